// Datasets and mixtures: a list, and all about one.
import { html, useState } from "./vendor/preact.module.js";
import { datasetPath, link, queryOf, specOf, useGet } from "./api.js";
import { bytes, compact, duration, num, percent, shown } from "./format.js";
import { stepsDone } from "./jobs.js";
import { Bar, Shares, SpecForm, Stat, Stats, Table, Trouble } from "./parts.js";
import { Plot, Range } from "./plot.js";

export function DatasetsView({ datasets, error }) {
  if (!datasets) return html`<${Trouble} error=${error} />`;
  return html`
    <${Trouble} error=${error} />
    <h1>Datasets</h1>
    <${Table} name="datasets" heads=${["name", "#rows", "#tokens", "#shards", "#size", "counted", "#bad rows"]}
      rows=${datasets.datasets.map((one) => ({ cells: [
        html`<a href=${link("dataset", [one.name])}>${shown(one.name)}</a>`,
        num(one.rows_served ?? one.rows), compact(one.tokens), num(one.shards), bytes(one.size_bytes), html`<${Counted} of=${one} />`, num(one.bad_rows.known),
      ] }))} />
    ${datasets.mixtures.length > 0 && html`<h2>Mixtures</h2>
      <${Table} name="mixtures" heads=${["name", "mix", "an epoch ends"]} rows=${datasets.mixtures.map((one) => ({ cells: [
        html`<a href=${link("dataset", [one.name])}>${shown(one.name)}</a>`, shown(one.mix), one.stopping_strategy,
      ] }))} />`}
    ${datasets.refused.length > 0 && html`<h2>Not served</h2>
      ${datasets.refused.map((one) => html`<p class="trouble">▲ <b>${shown(one.name)}</b>: ${shown(one.error)}</p>`)}`}`;
}

const firstSeen = {}; // progress of each dataset when the page first saw it

/** Seconds left by the pace since then, as another process counts; null before the first progress. */
function secondsLeft(name, { blocks, blocks_done: done }) {
  const first = (firstSeen[name] ??= { done, at: performance.now() });
  return done > first.done ? ((performance.now() - first.at) / 1000) * ((blocks - done) / (done - first.done)) : null;
}

/** How far the tokens are counted. */
export function Counted({ of: { name, index, tokens } }) {
  if (tokens != null) return "all";
  if (!index.blocks_done) return "no";
  const seconds = index.seconds_left ?? secondsLeft(name, index);
  const left = seconds ? `, about ${duration(seconds)} left` : "";
  return html`<${Bar} label="counted" fraction=${index.blocks_done / index.blocks} text=${`${num(index.blocks_done)} of ${num(index.blocks)} blocks${left}`} />`;
}

export function DatasetView({ route: { names: [name], query }, jobs, datasets }) {
  const { data, error } = useGet(datasetPath(name));
  const polled = datasets?.datasets.find((one) => one.name === name);
  if (!data) return html`<h1>${shown(name)}</h1><${Trouble} error=${error} />`;
  const one = { ...data[0], ...polled };
  return html`
    <h1>${shown(name)}</h1>
    <p class="actions">
      <a href=${link("batch", [name], { epoch: 0, rank: 0, step: 0 })}>View batches</a>
      <a href=${link("explore", [name])}>Explore parameters</a>
    </p>
    ${one.mix ? html`<${Mixture} ...${{ one, jobs }} />` : html`<${Plain} ...${{ one, name }} />`}
    <${Order} ...${{ name, query }} />`;
}

function Plain({ one, name }) {
  return html`
    ${one.refresh_error && html`<p class="trouble">▲ New data is not served: ${shown(one.refresh_error)}</p>`}
    ${one.bad_rows.refusal && html`<p class="trouble">▲ ${shown(one.bad_rows.refusal)}</p>`}
    <${Stats}>
      <${Stat} name="rows" value=${num(one.rows_served ?? one.rows)} note=${one.rows_served != null && one.rows_served < one.rows && `of ${num(one.rows)}; a filter leaves out the others`} />
      <${Stat} name="tokens" value=${one.tokens == null ? html`<${Counted} of=${one} />` : num(one.tokens)} note=${one.tokens == null && "counted"} />
      <${Stat} name="shards" value=${num(one.shards)} note=${bytes(one.size_bytes)} />
      <${Stat} name="in the cache" value=${bytes(one.blocks_bytes)} note=${`when all ${num(one.blocks)} blocks are made`} />
      ${one.prepared && html`<${Stat} name="in the store" value=${bytes(one.prepared.blocks_bytes)} note="prepared: all blocks and counts" />`}
      <${Stat} name="bad rows" value=${num(one.bad_rows.known)} note=${one.bad_rows.on_bad_row === "fail" ? "a batch with one fails" : "neighbours replace them"} />
    <//>
    <p><b>Recipe:</b> ${shown(one.recipe)}</p>
    <${Lengths} ...${{ name, one }} />
    ${one.splits && html`<h2>Splits</h2>
      <p class="quiet">By ${one.split_rule === "files" ? "the names of the shards" : "a stable hash of the row"}.</p>
      <${Table} name="splits" heads=${["split", "#rows", "#tokens", "#bad rows"]}
        rows=${Object.entries(one.splits).map(([split, size]) => ({ cells: [split, num(size.rows), num(size.tokens), num(size.bad_rows)] }))} />`}
    <h2>Snapshots</h2>
    <${Table} name="snapshots" heads=${["snapshot", "#shards", "#rows"]}
      rows=${one.snapshots.map((each) => ({ cells: [html`<code>${each.snapshot}</code>${each.snapshot === one.snapshot ? " (latest)" : ""}`, num(each.shards), num(each.rows)] }))} />
    ${one.bad_rows.known + one.bad_rows.unread_row_groups > 0 && html`<${BadRows} name=${name} />`}`;
}

function Lengths({ name, one }) {
  const { data } = useGet(one.tokens == null ? null : `${datasetPath(name)}/lengths`);
  if (!data?.[0].starts.length) return one.tokens == null && html`<p class="quiet">Tokens are counted when a run needs the counts, or by <code>penstock prepare</code>.</p>`;
  const { starts, rows } = data[0];
  const quantiles = { row: one.row_tokens, prompt: one.prompt_tokens, response: one.response_tokens };
  const bins = starts.slice(0, -1);
  return html`
    <h2>Lengths</h2>
    <${Table} name="lengths" heads=${["tokens of a", "#median", "#90 % at most", "#99 % at most", "#longest"]}
      rows=${Object.entries(quantiles).filter(([, of]) => of).map(([side, of]) => ({ cells: [side, num(of.median), num(of.p90), num(of.p99), num(of.longest)] }))} />
    <div class="plots">${Object.entries(rows).map(([side, counts]) => html`<${Plot} key=${side} title=${`Tokens of a ${side}`} note="rows in bins, four an octave"
      x=${{ name: "tokens", values: bins.map((_, at) => at), format: (at) => num(starts[at]) , long: (at) => `${num(starts[at])} to ${num(starts[at + 1] - 1)}`, range: (_, low, high) => [low, high + 1], incrs: [1, 2, 4, 8, 16, 32] }}
      series=${[{ name: "rows", values: counts, bars: true }]} />`)}</div>`;
}

function BadRows({ name }) {
  const [isOpen, setOpen] = useState(false);
  const { data, error } = useGet(isOpen ? `${datasetPath(name)}/quarantine?limit=200` : null);
  return html`<h2>Bad rows</h2>
    <details onToggle=${(event) => setOpen(event.target.open)}>
      <summary>Rows that cannot be used, with reasons</summary>
      <${Trouble} error=${error} />
      ${data && html`
        ${data[0].complete ? "" : html`<p class="quiet">More may come: not all rows are checked yet.</p>`}
        <${Table} name="bad rows" heads=${["#row", "shard", "#row group", "reason"]} rows=${[
          ...data[0].row_groups.map((group) => ({ cells: ["all", shown(group.shard), num(group.row_group), shown(group.reason)] })),
          ...data[0].rows.map((row) => ({ cells: [html`<a href=${link("row", [name, row.row])}>${num(row.row)}</a>`, shown(row.shard), num(row.row_group), shown(row.reason)] })),
        ]} />`}
    </details>`;
}

function Mixture({ one, jobs }) {
  const running = (jobs?.jobs ?? []).filter((job) => job.state === "running" && job.spec.mix && job.dataset === one.name);
  return html`
    <p><b>Mix:</b> ${shown(one.mix)}; an epoch ends: ${one.stopping_strategy}.</p>
    <p>Datasets: ${one.datasets.map((dataset) => html`<a href=${link("dataset", [dataset])}>${shown(dataset)}</a> `)}</p>
    ${running.length === 0 && html`<${Shares} name=${one.name} title="An epoch" query=${{ step: Number.MAX_SAFE_INTEGER }} />`}
    ${running.map((job) => html`<${Shares} key=${job.job + job.spec_digest} name=${one.name} title=${`Served so far to ${job.job}`} query=${{ ...job.spec, epoch: job.epoch, step: stepsDone(job) }} />`)}`;
}

const MEASURES = {
  neighbour_distance_p1: "distance of neighbours, closest 1 %", neighbour_distance_p10: "distance of neighbours, closest 10 %",
  neighbour_distance_median: "distance of neighbours, median", neighbour_distance_p90: "distance of neighbours, 90 %",
  neighbours_in_one_batch: "neighbours in one batch", blocks_per_batch: "blocks a global batch draws on", shards_per_batch: "shards a global batch draws on",
  unevenness_over_time: "unevenness over time", unevenness_over_ranks: "unevenness over ranks",
};

/** The shuffle report of the parameters in the query. It is made when asked for. */
function Order({ name, query }) {
  const [asked, setAsked] = useState(null);
  const { epoch = 0, ...spec } = specOf(query);
  const path = `${datasetPath(name)}/shuffle-report${queryOf({ epoch: query.epoch, ...spec })}`;
  const { data, error, isStale } = useGet(asked === path ? path : null);
  return html`
    <h2>Order</h2>
    <p class="quiet">Where the samples of an epoch come from, measured beside an exact uniform shuffle.</p>
    <${SpecForm} query=${spec} onChange=${(changed) => (location.hash = link("dataset", [name], changed))}>
      <button type="button" onClick=${() => setAsked(path)}>Measure this order</button>
    <//>
    <${Trouble} error=${error} />
    ${data && !isStale && html`<${Report} report=${data[0]} />`}`;
}

function Report({ report: { scatter, measures, sampled } }) {
  const points = scatter.flatMap((source) => source.numbers.map((number, at) => [number, source.dataset, source.places[at] / source.source_samples]));
  points.sort((a, b) => a[0] - b[0]);
  const sources = [...new Set(scatter.map((source) => source.dataset))];
  return html`
    <${Plot} height=${260} max=${1} title="Position in the source against position in the epoch" note="a uniform shuffle fills the square evenly; lines and steps are order"
      x=${{ name: "sample of the epoch", values: points.map(([number]) => number), format: compact }}
      series=${sources.map((source) => ({ name: source, points: true, format: percent, values: points.map(([, of, place]) => (of === source ? place : null)) }))} />
    <p class="quiet">${num(sampled.samples)} of ${num(sampled.of_epoch)} samples were looked up.</p>
    <${Table} name="measures" heads=${["measure", "#value", "within a uniform shuffle's range", "range", "unit"]}
      rows=${Object.entries(measures).map(([measure, of]) => ({ cells: [
        MEASURES[measure] ?? measure, compact(of.value), html`<${Range} ...${of} /> ${of.is_uniform ? "✓ yes" : "▲ no"}`, `${compact(of.low)} – ${compact(of.high)}`, of.unit,
      ] }))} />`;
}
