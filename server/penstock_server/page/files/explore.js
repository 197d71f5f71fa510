// Parameters before a run: what they make of an epoch, and what they need.
import { html, useMemo, useState } from "./vendor/preact.module.js";
import { datasetPath, link, queryOf, server, specOf, useGet } from "./api.js";
import { bytes, compact, duration, num, percent, shown } from "./format.js";
import { Copy, DatasetField, namesOf, SharesTable, SpecForm, Stat, Stats, Table, Trouble } from "./parts.js";

export function ExploreView({ route: { names, query }, datasets }) {
  const name = names[0] ?? namesOf(datasets)[0];
  const go = (dataset, changed) => (location.hash = link("explore", [dataset], changed));
  const spec = specOf(query);
  const paths = name ? ["estimate", "spec"].map((what) => `${datasetPath(name)}/${what}${queryOf(spec)}`) : [];
  const { data, error, isStale } = useGet(...paths);
  // Until data of new parameters comes, figures and Python stay those of the old ones.
  const drawn = useMemo(() => data && html`<${Result} name=${name} query=${spec} estimate=${data[0]} resolved=${data[1]} />`, [data]);
  if (!name) return null;
  return html`
    <h1>Explore parameters</h1>
    <p class="quiet">Change a parameter and see what an epoch holds, before a GPU is booked. Packing other than rows counts all tokens first.</p>
    <${SpecForm} query=${spec} onChange=${(changed) => go(name, changed)}>
      <${DatasetField} datasets=${datasets} value=${name} onChange=${(dataset) => go(dataset, spec)} />
    <//>
    <${Trouble} error=${error} />
    <div class=${isStale ? "stale" : ""}>${drawn}</div>
    ${name && html`<${Cache} name=${name} query=${spec} />`}
    ${data && html`<p class="actions"><a href=${link("batch", [name], { epoch: 0, rank: 0, step: 0, ...spec })}>View these batches</a></p>`}`;
}

function Result({ name, query, estimate, resolved }) {
  const { spec } = resolved;
  const perStep = spec.batch_size * spec.world_size;
  const cache = estimate.cache_advice ? "too small" : estimate.cache_room_bytes < estimate.cache_bytes ? "small" : "large enough";
  const uncounted = estimate.tokens == null && "not known until the tokens are counted";
  return html`
    <${Stats}>
      <${Stat} name="steps an epoch" value=${num(estimate.num_steps)} note=${`${num(perStep)} samples each`} />
      <${Stat} name="samples an epoch" value=${num(estimate.num_samples)} note=${`${num(estimate.num_samples - estimate.num_steps * perStep)} are not in a step`} />
      <${Stat} name="tokens an epoch" value=${compact(estimate.tokens)} note=${uncounted || `${compact(estimate.tokens / Math.max(1, estimate.num_steps))} a step`} />
      <${Stat} name="padding" value=${percent(estimate.padding)} level=${estimate.padding > 0.5 ? "waiting" : ""} note=${uncounted || (spec.pad === "seq_len" ? "of all positions" : "at most; pad makes less")} />
      <${Stat} name="cut rows" value=${percent(estimate.cut_rows)} level=${estimate.cut_tokens > 0.1 ? "waiting" : ""} note=${uncounted || `${percent(estimate.cut_tokens)} of the tokens are lost`} />
      <${Stat} name="a batch on the wire" value=${bytes(estimate.batch_bytes)} note=${`${bytes(estimate.batch_bytes * spec.world_size)} a step for all ranks`} />
      <${Stat} name="cache needed" value=${bytes(estimate.cache_bytes)} level=${cache === "large enough" ? "" : "waiting"}
        note=${`the server has room for ${bytes(estimate.cache_room_bytes)}: ${cache}`} />
    <//>
    ${estimate.cache_advice && html`<p class="trouble">▲ ${shown(estimate.cache_advice)}</p>`}
    ${resolved.advice.filter((advice) => advice !== estimate.cache_advice).map((advice) => html`<p class="trouble">▲ ${shown(advice)}</p>`)}
    ${estimate.shares.length > 1 && html`<h2>Shares of an epoch</h2><${SharesTable} shares=${estimate.shares} />`}
    <${Copy} name="Python" text=${remoteDataset(name, query, resolved)} />`;
}

/** Reads of the shards against the size of the cache. They are counted when asked for. */
function Cache({ name, query }) {
  const [asked, setAsked] = useState(null);
  const path = `${datasetPath(name)}/plan${queryOf(query)}`;
  const { data, error, isStale } = useGet(asked === path ? path : null);
  return html`
    <h2>Cache</h2>
    <p class="actions"><button type="button" onClick=${() => setAsked(path)}>Count the reads of the shards</button></p>
    <${Trouble} error=${error} />
    ${data && !isStale && html`<${Reads} plan=${data[0]} />`}`;
}

function Reads({ plan }) {
  return html`
    <${Stats}>
      <${Stat} name="no second read" value=${bytes(plan.read_once_bytes)} note=${`with the next window ${bytes(plan.read_ahead_bytes)}`} />
      <${Stat} name="everything" value=${bytes(plan.everything_bytes)} note=${`${num(plan.num_blocks)} blocks, ${plan.sizes}`} />
      <${Stat} name="reads here" value=${num(plan.here.reads)} note=${`${bytes(plan.here.source_bytes)} with ${bytes(plan.here.cache_bytes)}`} />
      <${Stat} name="to prepare" value=${duration(plan.prepare.seconds)} note=${`${compact(plan.prepare.tokens_per_second)} tokens a second`} />
    <//>
    <${Table} name="reads" heads=${["#cache", "#reads", "#again", "#hit rate", "#from the shards", "#next epoch"]}
      rows=${plan.curve.map((point) => ({ cells: [
        bytes(point.cache_bytes), num(point.reads), num(point.repeated_reads), percent(point.hit_rate), bytes(point.source_bytes), num(point.later_reads),
      ] }))} />`;
}

/** The constructor call of these parameters. The trainer's launcher gives rank and world_size. */
export function remoteDataset(name, query, { spec }, more = []) {
  const { world_size, ...others } = query;
  const given = Object.keys(others).map((parameter) => `${parameter}=${literal(spec[parameter], others[parameter])}`);
  const names = [JSON.stringify(server()), JSON.stringify(name), ...given, ...more];
  return `from penstock import RemoteDataset\n\ndata = RemoteDataset(${names.join(", ")})\n`;
}

/** A value in Python; `text` is that of the query, whose digits JavaScript would round. */
const literal = (value, text) => (value === true ? "True" : value === false ? "False" : typeof value === "number" ? text : JSON.stringify(text));
