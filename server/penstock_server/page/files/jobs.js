// Jobs: who waits, why, since when, and what the server reads for them.
import { html, useState } from "./vendor/preact.module.js";
import { datasetPath, link, queryOf, useGet, usePoll } from "./api.js";
import { bytes, clock, compact, duration, num, percent, shown, since } from "./format.js";
import { Bar, Shares, Stat, Stats, Table } from "./parts.js";
import { HeatMap } from "./plot.js";

const WAITING = 0.05; // of the time; the server counts from here on, too
const MAX_RANKS = 16; // in the table, until all are asked for

// What a rank waits for, and on which side the remedy is.
const STAGES = {
  connect: ["connecting to the server", "network"], queue: ["a free server thread", "server"], budget: ["room in the bytes in flight", "server"],
  index: ["counting tokens", "data"], read: ["reading cached blocks", "data"], decode: ["decoding Parquet", "data"], tokenize: ["tokenizing", "data"],
  make: ["assembling batches", "server"], network: ["the network", "network"], receive: ["receiving the body", "network"],
  retry: ["pausing after a failure", "network"], client: ["checks and tensors in the trainer", "client"],
};
const REMEDIES = {
  data: "run penstock prepare before the run, or give the server a larger cache or more cores", server: "more --processes or --inflight-bytes, or another server",
  network: "look at the rank's link, the proxy and the server's log", client: "a free core for the thread that reads the batches",
};
const SIDES = { data: "making blocks", server: "busy server", network: "network", client: "trainer" };
const hundredths = (rank) => Math.round(100 * (rank.wait_fraction ?? 0)); // ranks that wait alike keep their order
const stageName = (stage) => STAGES[stage]?.[0] ?? stage;

export function JobsView({ jobs }) {
  const history = usePoll("v1/jobs?history=true", 10);
  if (!jobs) return null;
  if (!jobs.jobs.length) {
    return html`<h1>Jobs</h1><p>No trainer has asked for batches in the last hour. <a href=${link("batch")}>Look at the batches</a> that one would get, or <a href=${link("explore")}>explore parameters</a>.</p>`;
  }
  const worst = jobs.jobs.filter((job) => job.state === "running").sort((a, b) => (b.wait_fraction ?? 0) - (a.wait_fraction ?? 0))[0];
  return html`
    <h1>Jobs</h1>
    <${Table} name="jobs" heads=${["job", "dataset", "#ranks", "#epoch", "progress", "time left", "#tokens/s", "#wait"]} rows=${jobs.jobs.map((job) => ({
      class: job.state === "ended" ? "ended" : "",
      cells: [
        html`<a href=${link("job", [job.job, job.spec_digest])}>${shown(job.job)}</a>${job.state === "ended" ? ` (ended ${duration(jobs.server.time - job.last_seen_at)} ago)` : ""}`,
        html`<a href=${link("dataset", [job.dataset])}>${shown(job.dataset)}</a>`, num(job.world_size), num(job.epoch), html`<${Progress} job=${job} />`,
        job.state === "running" ? duration(job.seconds_left) : "–", compact(job.tokens_per_second), html`<${Wait} fraction=${job.wait_fraction} />`,
      ],
    }))} />
    ${worst && html`<${Job} job=${worst} server=${jobs.server} history=${history.data} />`}`;
}

export function JobView({ route: { names: [name, spec] }, jobs }) {
  const history = usePoll("v1/jobs?history=true", 10);
  const job = jobs?.jobs.find((one) => one.job === name && one.spec_digest === spec);
  if (!jobs) return null;
  if (!job) return html`<h1>${shown(name)}</h1><p>This server has not seen the job in the last hour.</p>`;
  return html`<${Job} job=${job} server=${jobs.server} history=${history.data} />`;
}

/** Steps of the job's epoch, that of its slowest rank, that this rank has been given. */
export const stepsDone = (job) => Math.min(...job.ranks.filter((rank) => rank.epoch === job.epoch).map((rank) => rank.step + 1));

/** A wait, marked by a sign beside its colour. */
const Wait = ({ fraction }) => html`<span class=${fraction > WAITING ? "waiting" : ""}>${fraction > WAITING ? "▲ " : ""}${percent(fraction)}</span>`;

/** The progress of the slowest rank in the epoch. */
function Progress({ job, rank }) {
  const done = rank ? rank.step + 1 : stepsDone(job);
  if (!job.num_steps) return `${num(done)} steps`;
  return html`<${Bar} label="progress" fraction=${done / job.num_steps} text=${`${num(done)} of ${num(job.num_steps)}`} />`;
}

function Job({ job, server, history }) {
  const [chosen, setChosen] = useState(null);
  const [isLong, setLong] = useState(false);
  const past = history?.jobs.find((one) => one.job === job.job && one.spec_digest === job.spec_digest);
  const clockOf = history?.server.history;
  const now = server.time;
  const ranks = [...job.ranks].sort((a, b) => (b.rank === chosen) - (a.rank === chosen) || hundredths(b) - hundredths(a) || a.rank - b.rank);
  const isRunning = job.state === "running";
  const waiting = ranks.filter((rank) => rank.wait_fraction > WAITING).slice(0, 3);
  return html`<section class=${isRunning ? "" : "ended"}>
    <h2>${shown(job.job)}</h2>
    <${Stats}>
      <${Stat} name="waits" value=${html`<${Wait} fraction=${job.wait_fraction} />`} note="of its time lately, all ranks" level=${job.wait_fraction > WAITING ? "waiting" : ""} />
      <${Stat} name="tokens/s" value=${compact(job.tokens_per_second)} note=${`${num(job.ranks.length)} of ${num(job.world_size)} ranks report here`} />
      <${Stat} name=${`epoch ${num(job.epoch)}`} value=${html`<${Progress} job=${job} />`} note="steps of its slowest rank" />
      <${Stat} name="time left" value=${isRunning ? duration(job.seconds_left) : "ended"} note=${isRunning ? "of the epoch" : since(job.last_seen_at, now)} />
      <${Stat} name="first report" value=${clock(job.started_at)} note=${html`${duration(now - job.started_at)} ago, on <a href=${link("dataset", [job.dataset])}>${shown(job.dataset)}</a> <code>${job.snapshot}</code>`} />
    <//>
    ${isRunning && waiting.map((rank) => html`<p class="trouble"><${Sentence} ...${{ rank, now }} /> ${job.stragglers.filter((one) => one.rank === rank.rank).map((one) => html`<span class="quiet">${shown(one.text)}</span>`)}</p>`)}
    ${job.stragglers.filter((one) => !waiting.some((rank) => rank.rank === one.rank)).map((one) => html`<p class="trouble">▲ ${shown(one.text)}</p>`)}
    ${isRunning && html`<${Why} job=${job} /><${CacheNote} job=${job} />`}
    ${job.spec.mix && html`<${Shares} name=${job.dataset} title="Served so far of each dataset" query=${{ ...job.spec, epoch: job.epoch, step: stepsDone(job) }} />`}
    ${past && clockOf && html`<h3>How long each rank waited, the last hour ${now - server.started_at < 3600 && html`<span class="quiet">(the server began ${since(server.started_at, now)})</span>`}</h3>
      <${HeatMap} rows=${[...past.ranks].sort((a, b) => a.rank - b.rank)} end=${clockOf.end} seconds=${clockOf.seconds} onChoose=${setChosen} />`}
    <h3>Ranks, longest wait first</h3>
    <${Table} isNowrap name="ranks" heads=${["#rank", "#waits", "for", "since", "now", "#epoch", "step", "#tokens/s", "#lag", "#buffered", "#retries", "last report"]}
      rows=${ranks.slice(0, isLong ? ranks.length : MAX_RANKS).map((rank) => ({
        key: rank.rank, class: rank.rank === chosen ? "chosen" : "",
        cells: [
          html`<b>${num(rank.rank)}</b>`, html`<${Wait} fraction=${rank.wait_fraction} />`, reasons(rank, rank.wait_fraction > WAITING ? 3 : 1), since(rank.waits_since, now), html`<${Doing} doing=${rank.doing} now=${now} />`,
          num(rank.epoch), html`<a href=${batchOf(job, rank)} title="show this batch"><${Progress} ...${{ job, rank }} /></a>`,
          compact(rank.tokens_per_second), num(rank.lag), bytes(rank.buffered_bytes), num(rank.retries + rank.corrupted), `${duration(now - rank.last_seen_at)} ago`,
        ],
      }))} />
    ${ranks.length > MAX_RANKS && !isLong && html`<button type="button" onClick=${() => setLong(true)}>Show all ${num(ranks.length)} ranks</button>`}
    <details><summary>Parameters</summary><code>${Object.entries(job.spec).filter(([, value]) => value != null).map(([parameter, value]) => `${parameter}=${value}`).join(" ")}</code></details>
  </section>`;
}

const batchOf = (job, rank) => link("batch", [job.dataset], { epoch: rank.epoch, rank: rank.rank, step: Math.max(0, rank.step), ...job.spec });

/** Which rank waits, how long, why, since when, and what the server reads for it. */
const Sentence = ({ rank, now }) => html`▲ <b>Rank ${num(rank.rank)} waits ${percent(rank.wait_fraction)}</b> of its time: ${reasons(rank, 3)}.
  ${rank.waits_since && ` It has waited since ${since(rank.waits_since, now)}.`} ${rank.doing && html`Now: <${Doing} doing=${rank.doing} now=${now} />.`}`;

/** The stages that a rank waited for most, longest first, with the part of its time that each took. */
function reasons(rank, most) {
  const parts = partsOf(rank).filter(([, part]) => part > 0.05 * rank.wait_fraction).slice(0, most);
  if (parts.length < 2) return parts.length ? stageName(parts[0][0]) : "–";
  return parts.map(([stage, part]) => `${stageName(stage)} ${percent(part)}`).join(", ");
}

/** The parts of the time of a rank, or of a job, that it waited: pairs of stage and fraction, longest first. */
function partsOf({ wait_seconds: seconds, wait_fraction: fraction }) {
  const total = Object.values(seconds).reduce((sum, each) => sum + each, 0);
  return Object.entries(seconds).map(([stage, each]) => [stage, (fraction * each) / total]).filter(([, part]) => part > 0).sort((a, b) => b[1] - a[1]);
}

/** The request that a rank waits for now. */
function Doing({ doing, now }) {
  if (!doing) return "–";
  const shard = doing.shard ? html` (<b>${shown(doing.shard)}</b>)` : "";
  return html`${stageName(doing.stage)}${shard}, requested ${duration(Math.max(0, now - doing.since))} ago`;
}

/** The time of a job's ranks as one bar, its waits by stage, with a legend in words. */
function Why({ job }) {
  const parts = partsOf(job);
  if (!parts.length) return null;
  const remedy = job.ranks.some((rank) => rank.wait_fraction > WAITING) && REMEDIES[STAGES[parts[0][0]]?.[1]];
  return html`<h3>What its ranks wait for lately</h3>
    <div class="why" aria-hidden="true">
      ${parts.map(([stage, part]) => html`<span class=${`side-${STAGES[stage]?.[1]}`} style=${{ flexGrow: part }}></span>`)}
      <span class="side-compute" style=${{ flexGrow: 1 - job.wait_fraction }}></span>
    </div>
    <ul class="legend">${parts.filter(([, part]) => part >= 0.0005).map(([stage, part]) => html`
      <li><span class=${`swatch side-${STAGES[stage]?.[1]}`}></span> ${stageName(stage)} <b>${percent(part)}</b> <span class="quiet">(${SIDES[STAGES[stage]?.[1]] ?? "other"})</span></li>`)}
      <li><span class="swatch side-compute"></span> computing <b>${percent(1 - job.wait_fraction)}</b></li></ul>
    ${remedy && html`<p>Against waits for ${stageName(parts[0][0])}: ${remedy}.</p>`}`;
}

/** Whether the cache is large enough for a job, from its order and not from what happened to be asked for. */
function CacheNote({ job }) {
  const { data } = useGet(`${datasetPath(job.dataset)}/estimate${queryOf(job.spec)}`);
  if (!data) return null;
  const [{ cache_bytes: needed, cache_room_bytes: room, blocks_bytes: all, cache_advice: advice }] = data;
  const sizes = `Its order needs ${bytes(needed)}, all blocks take ${bytes(all)}, and there is room for ${bytes(room)}.`;
  if (advice) return html`<p class="trouble">▲ The cache is too small for this job. ${shown(advice)} ${sizes}</p>`;
  return room < needed
    ? html`<p class="trouble">▲ The cache is small for this job. ${sizes} Some blocks are made more than once an epoch; if ranks wait for blocks, a larger cache helps.</p>`
    : html`<p>● The cache is large enough for this job. ${sizes}</p>`;
}
