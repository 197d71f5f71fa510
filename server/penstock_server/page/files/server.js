// The server: its rates over the last hour, its cache and its memory, and what it counts.
import { html } from "./vendor/preact.module.js";
import { usePoll } from "./api.js";
import { bytes, clock, compact, duration, num, percent, shown } from "./format.js";
import { Bar, Stat, Stats, Table, Trouble } from "./parts.js";
import { Counted } from "./datasets.js";
import { Plot } from "./plot.js";

export function ServerView({ jobs, datasets }) {
  const { data, error } = usePoll("v1/jobs?history=true", 10);
  if (!jobs) return html`<${Trouble} error=${error} />`;
  const { server } = jobs;
  const past = data?.server.history;
  const counting = (datasets?.datasets ?? []).filter((one) => one.tokens == null && one.index.blocks_done);
  const failure = datasets?.datasets.find((one) => one.cache.failure)?.cache.failure;
  const seesAll = server.tokens_per_second != null;
  return html`
    <h1>Server</h1>
    <${Stats}>
      ${seesAll && html`
      <${Stat} name="tokens/s" value=${compact(server.tokens_per_second)} note="the last minute" />
      <${Stat} name="sent" value=${`${bytes(server.bytes_per_second)}/s`} note=${`${compact(server.batches_per_second)} batches/s`} />
      <${Stat} name="refusals" value=${`${compact(server.refusals_per_second)}/s`} level=${server.refusals_per_second > 0 ? "waiting" : ""} note="503 answers" />
      <${Stat} name="bytes in flight" value=${html`<${Bar} label="in flight" fraction=${server.in_flight_bytes / server.in_flight_budget_bytes} text=${bytes(server.in_flight_bytes)} />`}
        note=${`budget ${bytes(server.in_flight_budget_bytes)}`} />
      <${Stat} name="cache" value=${html`<${Bar} label="cache" fraction=${server.cache_used_bytes / server.cache_budget_bytes} text=${bytes(server.cache_used_bytes)} />`}
        note=${`room for ${bytes(server.cache_budget_bytes)}`} />
      <${Stat} name="cache hits" value=${percent(server.cache_hit_fraction)} note="of blocks, the last minute" level=${server.cache_hit_fraction < 0.5 ? "waiting" : ""} />`}
      <${Stat} name="began" value=${clock(server.started_at)} note=${`${duration(server.time - server.started_at)} ago, ${num(server.processes)} process${server.processes > 1 ? "es" : ""}, version ${server.version}`} />
    <//>
    ${!seesAll && html`<p>Rates, memory and cache are those of all datasets together. Sign in with a token for all datasets to see them.</p>`}
    ${failure && html`<p class="trouble">▲ Blocks cannot be stored: ${shown(failure)}</p>`}
    ${server.source_requests_throttled > 0 && html`<p class="trouble">▲ The store of the shards throttles this server: ${num(server.source_requests_throttled)} requests repeated in the last minute.</p>`}
    ${server.source_requests_failed > 0 && html`<p class="trouble">▲ The store of the shards does not respond as expected: ${num(server.source_requests_failed)} requests repeated in the last minute.</p>`}
    ${counting.length > 0 && html`<h2>Counting tokens</h2>
      <${Table} name="counting" heads=${["dataset", "progress"]} rows=${counting.map((one) => ({ cells: [shown(one.name), html`<${Counted} of=${one} />`] }))} />`}
    ${seesAll && past && html`<h2>The last hour</h2><div class="plots">${plots(past)}</div>`}`;
}

function plots({ seconds, end, tokens, bytes: sent, refusals, hits, misses, cache_used_bytes: used }) {
  const times = tokens.map((_, at) => end - (tokens.length - 1 - at) * seconds);
  const rate = (values) => values.map((value, at) => (value == null || at === values.length - 1 ? null : value / seconds)); // the last is not over
  const hitFraction = hits.map((hit, at) => (hit == null || hit + misses[at] === 0 ? null : hit / (hit + misses[at])));
  const one = (title, values, format, max) => html`<${Plot} key=${title} title=${title} max=${max} x=${{ values: times }} series=${[{ name: title, values, format }]} />`;
  return [
    one("tokens/s", rate(tokens), compact),
    one("bytes/s", rate(sent), (value) => `${bytes(value)}/s`),
    one("refusals/s", rate(refusals), compact),
    one("cache hits", hitFraction, percent, 1),
    one("cache used", used, bytes),
  ];
}
