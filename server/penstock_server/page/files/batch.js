// One batch as a trainer gets it, and one row with the steps that show it.
import { html, useEffect, useMemo } from "./vendor/preact.module.js";
import { currentRoute, datasetPath, link, queryOf, server, specOf, useGet } from "./api.js";
import { remoteDataset } from "./explore.js";
import { bytes, num, shown } from "./format.js";
import { Copy, DatasetField, Field, namesOf, SpecForm, Table, Trouble } from "./parts.js";

const IGNORED = -100; // the label of a token without loss
const MAX_TOKENS = 5000; // drawn one by one of a sample

export function BatchView({ route: { names, query }, datasets, jobs }) {
  const name = names[0] ?? namesOf(datasets)[0];
  const { epoch, rank, step } = Object.fromEntries(["epoch", "rank", "step"].map((key) => [key, Number(query[key]) || 0]));
  const spec = specOf(query);
  const go = (changed, dataset = name) => (location.hash = link("batch", [dataset], { epoch, rank, step, ...query, ...changed }));
  const batches = `epochs/${epoch}/ranks/${rank}/batches/${step}`;
  const pinned = (more) => `${datasetPath(name)}/${batches}${more}`;
  const { data, error, isStale } = useGet(
    ...(name ? [`${datasetPath(name)}/spec${queryOf(spec)}`, pinned(queryOf({ ...spec, format: "tokens" })), pinned(`/provenance${queryOf(spec)}`)] : []),
  );
  const numSteps = data?.[0].num_steps;
  const move = (by) => {
    const now = currentRoute().query; // a key may come again before the page is drawn
    const next = (Number(now.step) || 0) + by;
    if (next >= 0 && (numSteps == null || next < numSteps)) location.hash = link("batch", [name], { ...now, step: next, line: null });
  };
  useEffect(() => {
    const onKey = (event) => {
      if (event.target.closest?.("input, select, textarea, canvas, .scroll, pre") || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "ArrowLeft" || event.key === "k") move(-1);
      if (event.key === "ArrowRight" || event.key === "j") move(1);
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  });
  useEffect(() => {
    if (data && !isStale && query.line) document.getElementById(`line-${query.line}`)?.scrollIntoView();
  }, [data, query.line]);
  // Thousands of tokens: not again with every poll.
  const drawn = useMemo(
    () => data && html`<${Batch} ...${{ name, query, spec, resolved: data[0], batch: data[1], provenance: data[2], caller: jobs?.caller }} />`,
    [data, query.tokens, query.line],
  );
  if (!name) return null;
  const whole = (key, value) => html`<${Field} name=${key} value=${String(value)} schema=${{ type: "integer" }} onChange=${(changed) => go({ [key]: changed, line: null })} />`;
  return html`
    <h1>Batches of ${shown(name)}</h1>
    <${SpecForm} query=${spec} onChange=${(changed) => (location.hash = link("batch", [name], { epoch, rank, step, tokens: query.tokens, ...changed }))}>
      <${DatasetField} datasets=${datasets} value=${name} onChange=${(dataset) => go({ snapshot: null, step: 0, line: null }, dataset)} />
      ${whole("epoch", epoch)} ${whole("rank", rank)}
      <span class="stepper">
        <button type="button" onClick=${() => move(-1)} aria-label="step back" title="left arrow key">◀</button>
        ${whole("step", step)}
        <button type="button" onClick=${() => move(1)} aria-label="step forward" title="right arrow key">▶</button>
      </span>
      <label class="check"><input type="checkbox" checked=${query.tokens === "1"} onChange=${(event) => go({ tokens: event.target.checked ? 1 : null })} /> <span>show tokens</span></label>
    <//>
    <${Trouble} error=${error} />
    <div class=${isStale ? "stale" : ""}>${drawn}</div>`;
}

function Batch({ name, query, spec, resolved, batch, provenance, caller }) {
  const widths = Object.fromEntries(batch.tensors.map(([tensor, , shape]) => [tensor, shape[1]]));
  // A row's own dataset serves its look-ups, with the mix that the batch is of.
  const { mix, stopping_strategy, snapshot } = resolved.spec;
  const isCut = resolved.spec.packing === "rows" && resolved.spec.overflow === "truncate";
  const ofRow = { ...spec, epoch: batch.epoch, tokens: query.tokens, ...(mix ? { mix, stopping_strategy, snapshot } : {}) };
  return html`
    <p>Step ${num(batch.step)} of ${num(resolved.num_steps)}, rank ${num(batch.rank)} of ${num(resolved.spec.world_size)}, epoch ${num(batch.epoch)}; ${bytes(batch.nbytes)},
      snapshot <code>${batch.snapshot}</code>${batch.replaced > 0 && html`; <b>▲ ${num(batch.replaced)} samples replace bad rows</b>`}</p>
    <p class="legend quiet"><span class="in-loss">text with loss</span> <span class="no-loss">text without loss</span> <span class="boundary">¶ a row begins</span> <span class="padding">padding</span></p>
    ${batch.samples.map((sample, at) => html`<${Sample} key=${at} ...${{ sample, widths, ofRow, sources: provenance.samples[at].sources, isCut, hasTokens: query.tokens === "1", isChosen: query.line === String(at) }} />`)}
    <h2>Share it</h2>
    <${Addresses} ...${{ name, query, spec, resolved, batch, caller }} />`;
}

function Addresses({ name, query, spec, resolved, batch, caller }) {
  const pinned = { ...spec, snapshot: batch.snapshot };
  const address = { epoch: batch.epoch, rank: batch.rank, step: batch.step };
  const perStep = resolved.spec.batch_size * resolved.spec.world_size;
  const { offset = 0, ...others } = pinned;
  const python = `${remoteDataset(name, others, resolved, [`rank=${batch.rank}`, `world_size=${resolved.spec.world_size}`])}data.seek(${Number(offset) + (batch.epoch * resolved.num_steps + batch.step) * perStep})\nbatch = next(iter(data))\n`;
  return html`
    <${Copy} name="link" text=${`${server()}/${link("batch", [name], { ...query, ...address, snapshot: batch.snapshot })}`} />
    <${Copy} name="curl" text=${`curl ${caller ? '-H "Authorization: Bearer $PENSTOCK_TOKEN" ' : ""}'${server()}/${datasetPath(name).replaceAll("'", "%27")}/epochs/${batch.epoch}/ranks/${batch.rank}/batches/${batch.step}${queryOf({ ...pinned, format: "json" }).replaceAll("'", "%27")}'`} />
    ${!(offset && batch.epoch) && html`<${Copy} name="Python" text=${python} />`}`;
}

/** A sample: one line, or two for a preference pair and for seq2seq. */
function Sample({ sample, widths, sources, ofRow, isCut, hasTokens, isChosen }) {
  const lines = [];
  for (const side of ["", "chosen_", "rejected_"]) {
    const ids = sample[`${side}input_ids`];
    if (!ids) continue;
    lines.push({ name: side.replace("_", ""), ids, texts: sample[`${side}token_texts`], labels: sample[`${side}labels`], width: widths[`${side}input_ids`] });
  }
  if ("label_lengths" in sample) {
    lines[0] = { ...lines[0], name: "prompt", labels: null };
    lines.push({ name: "response", ids: sample.labels, texts: sample.label_texts, labels: sample.labels, width: widths.labels });
  }
  const numCut = isCut && lines.length === 1 ? sources[0].row_tokens - sources[0].stop : 0; // of a pair, one side may be cut
  const columns = Object.entries(sample.columns ?? {});
  return html`<article class="sample ${isChosen ? "chosen" : ""}" id=${`line-${sample.index}`}>
    <h3>Sample ${sample.index} <span class="quiet">${num(sample.num_tokens)} tokens from</span>
      ${sources.map((source, at) => at < 8 && html` <${Source} ...${{ source, ofRow }} />`)} ${sources.length > 8 && html`<span class="quiet">and ${num(sources.length - 8)} rows more</span>`}
    </h3>
    ${lines.map((line) => html`<${Line} ...${{ line, hasTokens, ofRow, numCut, sources: lines.length === 1 ? sources : [], starts: sample.document_starts ?? [] }} />`)}
    ${columns.length > 0 && html`<dl class="columns">${columns.map(([column, value]) => html`<dt>${shown(column)}</dt><dd>${shown(typeof value === "string" ? value : JSON.stringify(value))}</dd>`)}</dl>`}
  </article>`;
}

const Source = ({ source, ofRow }) => html`<a href=${link("row", [source.dataset, source.dataset_row], ofRow)}
  title=${`${source.shard}, row group ${source.row_group}, row ${source.row}: tokens ${source.start} to ${source.stop} of ${source.row_tokens}`}>
  ${shown(source.dataset)} row ${num(source.dataset_row)}</a>`;

function Line({ line: { name, ids, texts, labels, width }, sources, starts, hasTokens, ofRow, numCut }) {
  const numLoss = labels ? labels.filter((label) => label !== IGNORED).length : 0;
  return html`<div class="line">
    <p class="quiet">${name && html`<b>${name}</b>: `}${num(ids.length)} tokens, ${num(numLoss)} with loss${width > ids.length && `, ${num(width - ids.length)} padding`}${numCut > 0 && html`, <b>▲ ${num(numCut)} cut off</b>`}</p>
    <div class="text ${hasTokens ? "tokens" : ""}" tabindex="0">
      ${runs({ ids, texts, labels, sources, starts, hasTokens, ofRow })}
      ${hasTokens && ids.length > MAX_TOKENS && html`<span class="boundary">… and ${num(ids.length - MAX_TOKENS)} tokens more</span>`}
      ${width > ids.length && html`<span class="padding">${num(width - ids.length)} padding</span>`}
    </div>
  </div>`;
}

/** The tokens as spans: one for each token, or one for each stretch with or without loss; and a mark where a row begins. */
function runs({ ids, texts, labels, sources, starts, hasTokens, ofRow }) {
  const begins = new Map(starts.map((start) => [start, null]));
  let end = 0;
  for (const source of sources) {
    begins.set(end, source);
    end += source.stop - source.start;
  }
  if (begins.size === 1) begins.delete(0);
  const parts = [];
  let run = "";
  const count = hasTokens ? Math.min(ids.length, MAX_TOKENS) : ids.length;
  for (let at = 0; at < count; at++) {
    if (begins.has(at)) {
      const source = begins.get(at);
      parts.push(html`<span class="boundary">¶ ${source ? html`<${Source} ...${{ source, ofRow }} />` : ""}</span>`);
    }
    const isInLoss = labels ? labels[at] !== IGNORED : false;
    const kind = isInLoss ? "in-loss" : "no-loss";
    run += texts ? texts[at] : `${ids[at]} `;
    const isLast = at + 1 === count || begins.has(at + 1) || (labels && (labels[at + 1] !== IGNORED) !== isInLoss);
    if (hasTokens || isLast) {
      parts.push(html`<span class=${kind} title=${hasTokens ? `token ${ids[at]}, position ${at}` : null}>${run ? shown(run) : html`<span class="hidden-char">·</span>`}</span>`);
      run = "";
    }
  }
  return parts;
}

export function RowView({ route: { names: [name, row], query } }) {
  const spec = specOf(query);
  const epoch = query.epoch ?? 0;
  const path = `${datasetPath(name)}/rows/${row}`;
  const { data: content, error } = useGet(path);
  const { data: places, error: noPlaces } = useGet(`${path}/schedule${queryOf({ epoch, ...spec })}`);
  const facts = content?.[0];
  return html`
    <h1>Row ${num(Number(row))} of <a href=${link("dataset", [name])}>${shown(name)}</a></h1>
    <p class="actions">${row > 0 && html`<a href=${link("row", [name, row - 1], query)}>Row before</a>`} <a href=${link("row", [name, Number(row) + 1], query)}>Row after</a></p>
    <${Trouble} error=${error} />
    ${facts && html`
      <p>${shown(facts.shard)}, row group ${num(facts.row_group)}, row ${num(facts.row_in_group)}${facts.split && `, split ${facts.split}`}</p>
      ${facts.bad && html`<p class="trouble">▲ This row cannot be used: it ${shown(facts.bad)}.</p>`}
      ${facts.filtered_by && html`<p class="trouble">▲ Left out by ${shown(facts.filtered_by)}.</p>`}
      ${["", "chosen_", "rejected_"].filter((side) => facts[`${side}tokens`]).map((side) => html`
        <p class="quiet">${side.replace("_", " ")}${num(facts[`${side}num_tokens`])} tokens, ${num(facts[`${side}num_loss_tokens`])} with loss</p>
        <div class="text" tabindex="0">${turnsOf(facts, side).map((turn) => html`<span class=${turn.in_loss ? "in-loss" : "no-loss"}>${shown(turn.text)}</span>`)}</div>`)}
      ${facts.columns && html`<dl class="columns">${Object.entries(facts.columns).map(([column, value]) => html`<dt>${shown(column)}</dt><dd>${shown(typeof value === "string" ? value : JSON.stringify(value))}</dd>`)}</dl>`}`}
    <h2>When epoch ${num(Number(epoch))} shows it</h2>
    <${SpecForm} query=${spec} onChange=${(changed) => (location.hash = link("row", [name, row], { epoch, ...changed }))}>
      <${Field} name="epoch" value=${String(epoch)} schema=${{ type: "integer" }} onChange=${(changed) => (location.hash = link("row", [name, row], { ...query, epoch: changed }))} />
    <//>
    <${Trouble} error=${noPlaces} />
    ${places && (places[0].occurrences.length
      ? html`<${Table} name="places" heads=${["batch", "#step", "#rank", "#sample"]} rows=${places[0].occurrences.map((place) => ({ cells: [
          html`<a href=${link("batch", [name], { ...spec, tokens: query.tokens, epoch, rank: place.rank, step: place.step, line: place.index })}>show it</a>`, num(place.step), num(place.rank), num(place.index),
        ] }))} />`
      : html`<p>This epoch does not show it.</p>`)}`;
}

/** The turns of a row, or all of it as one; its ids if the dataset has no tokenizer. */
function turnsOf(facts, side) {
  const turns = facts[`${side}turns`] ?? [{ in_loss: true, text: facts[`${side}text`] }];
  return turns[0]?.text == null ? [{ in_loss: true, text: facts[`${side}tokens`].join(" ") }] : turns;
}
