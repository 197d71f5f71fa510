"""Chat templates in the styles that are about, written for these tests. Comments stand around what the assistant says."""

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = """\
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {#- says -#}{{ message.content + '<|im_end|>' }}{#- said -#}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt }}"""

LLAMA_2 = """\
{%- if messages[0].role == 'system' -%}
    {%- set system, rest = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n', messages[1:] -%}
{%- else -%}
    {%- set system, rest = '', messages -%}
{%- endif -%}
{%- for message in rest -%}
    {%- if (message.role == 'user') != (loop.index0 is even) -%}
        {{- raise_exception('roles must alternate') -}}
    {%- endif -%}
    {%- if message.role == 'user' -%}
        {{- bos_token + '[INST] ' + (system if loop.first else '') + message.content.strip() + ' [/INST]' -}}
    {%- elif message.role == 'assistant' -%}
        {#- says -#}{{- ' ' + message.content.strip() + ' ' + eos_token -}}{#- said -#}
    {%- endif -%}
{%- endfor -%}"""

LLAMA_3 = """\
{{- bos_token }}
{%- set date = strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024' %}
{%- macro header(role) %}<|start_header_id|>{{ role }}<|end_header_id|>{{ '\\n\\n' }}{% endmacro %}
{%- for message in messages %}
    {{- header(message.role) }}
    {%- if message.role == 'system' %}
        {{- 'Today: ' + date + '\\n' + message.content | trim + '<|eot_id|>' }}
    {%- elif message.role == 'assistant' %}
        {#- says -#}
        {%- if message.tool_calls %}
            {{- message.tool_calls | tojson + '<|eom_id|>' }}
        {%- else %}
            {{- message.content | trim + '<|eot_id|>' }}
        {%- endif %}
        {#- said -#}
    {%- else %}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ header('assistant') }}{% endif %}"""

ZEPHYR = """\
{% for message in messages %}
{% if message['role'] not in ['system', 'user', 'assistant'] %}
{{ raise_exception('there is no role ' + message['role']) }}
{% endif %}
{{ '<|' + message['role'] + '|>' }}
{% if message['role'] == 'assistant' %}
{# says #}
{{ message['content'] + eos_token }}{# said #}

{% else %}
{{ message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

GEMMA = """\
{{- bos_token -}}
{%- for message in messages -%}
    {%- set role = 'model' if message.role == 'assistant' else message.role -%}
    {{- '<start_of_turn>' ~ role ~ '\\n' -}}
    {%- if message.role == 'assistant' -%}
        {#- says -#}{{- message.content | trim ~ '<end_of_turn>' -}}{#- said -#}
    {%- else -%}
        {{- message.content | trim ~ '<end_of_turn>' -}}
    {%- endif -%}
    {{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}"""

PHI_3 = """\
{%- for message in messages %}
    {{- '<|' + message.role + '|>\\n' }}
    {%- if message.role == 'assistant' %}
        {#- says -#}{{ message.content + '<|end|>' }}{#- said -#}
    {%- else %}
        {{- message.content + '<|end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{{- '<|assistant|>\\n' if add_generation_prompt else '<|endoftext|>' }}"""

PLAIN = """\
{%- for message in messages %}
    {{- message.role | capitalize + ': ' }}
    {%- if message.role == 'assistant' %}
        {#- says -#}{{ message.content + '\\n' }}{#- said -#}
    {%- else %}
        {{- message.content + '\\n' }}
    {%- endif %}
{%- endfor %}
{{- 'Assistant: ' if add_generation_prompt }}"""

# Writes the reasoning of the last turn alone.
FORGETFUL = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {#- says -#}
        {%- if loop.last %}
            {{- '<think>\\n' + message.reasoning_content | default('') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content + '<|im_end|>' }}
        {#- said -#}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt }}"""

# Begins the assistant's turn without having prompted for it.
PROMPTLESS = CHATML.replace("{{- '<|im_start|>assistant\\n' if add_generation_prompt }}", "")

STEADY = {
    "CHATML": CHATML,
    "LLAMA_2": LLAMA_2,
    "LLAMA_3": LLAMA_3,
    "ZEPHYR": ZEPHYR,
    "GEMMA": GEMMA,
    "PHI_3": PHI_3,
    "PLAIN": PLAIN,
}


def marked(template: str) -> str:
    """The same template, with what the assistant says marked."""
    for comment, tag in (("says", "generation"), ("said", "endgeneration")):
        template = template.replace(f"{{# {comment} #}}", f"{{% {tag} %}}").replace(f"{{#- {comment} -#}}", f"{{%- {tag} -%}}")
    return template
