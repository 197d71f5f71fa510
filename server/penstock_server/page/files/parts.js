// Parts that several views share.
import { html, useEffect, useRef, useState } from "./vendor/preact.module.js";
import { datasetPath, get, link, queryOf, useGet } from "./api.js";
import { compact, duration, num, percent, shown } from "./format.js";

export const Stat = ({ name, value, note, level = "" }) =>
  html`<div class="stat ${level}"><dt>${name}</dt><dd>${value}</dd>${note && html`<dd class="note">${note}</dd>`}</div>`;

export const Stats = ({ children }) => html`<dl class="stats">${children}</dl>`;

/** A bar of one fraction, with its text beside it. */
export const Bar = ({ fraction, text, label }) => html`
  <span class="bar-line">
    <span class="bar" role="img" aria-label=${`${label ?? ""} ${percent(fraction)}`}>
      <span style=${{ width: `${100 * Math.min(1, fraction || 0)}%` }}></span>
    </span>
    ${text ?? percent(fraction)}
  </span>`;

/** An error, or the progress of a server that is not ready. */
export function Trouble({ error }) {
  if (!error) return null;
  if (error.total) {
    const left = error.secondsLeft ? `, about ${duration(error.secondsLeft)} left` : "";
    return html`<p class="trouble" role="status">
      ${shown(error.message)} <${Bar} fraction=${error.done / error.total} text=${`${num(error.done)} of ${num(error.total)}${left}`} />
    </p>`;
  }
  return html`<p class="trouble" role="alert">▲ ${shown(error.message)}</p>`;
}

/** A table that scrolls inside itself. Headings that begin with # are of numbers. */
export const Table = ({ heads, rows, name, isNowrap }) => html`
  <div class="scroll ${isNowrap ? "nowrap" : ""}" tabindex="0" role="region" aria-label=${name}>
    <table>
      <thead><tr>${heads.map((head) => html`<th scope="col" class=${head[0] === "#" ? "number" : ""}>${head.replace(/^#/, "")}</th>`)}</tr></thead>
      <tbody>${rows.map(({ cells, ...row }) => html`<tr ...${row}>
        ${cells.map((cell, at) => html`<td class=${heads[at][0] === "#" ? "number" : ""}>${cell}</td>`)}
      </tr>`)}</tbody>
    </table>
  </div>`;

/** The samples of each dataset of a mixture before a step, which the query names with the spec. */
export function Shares({ name, title, query }) {
  const { data, error } = useGet(`${datasetPath(name)}/shares${queryOf(query)}`);
  if (!data) return html`<${Trouble} error=${error} />`;
  return html`<h3>${shown(title)}</h3><${SharesTable} shares=${data[0].datasets} />`;
}

export const SharesTable = ({ shares }) => html`
  <${Table} name="shares" heads=${["dataset", "share", "#samples", "#passes"]} rows=${shares.map((each) => ({ cells: [
    html`<a href=${link("dataset", [each.dataset])}>${shown(each.dataset)}</a>`, html`<${Bar} label="share" fraction=${each.share} />`, num(each.samples), compact(each.passes),
  ] }))} />`;

/** Text to copy. Browsers give pages without TLS no clipboard, so it can also be selected. */
export function Copy({ name, text }) {
  const [state, setState] = useState("Copy");
  const pre = useRef();
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      setState("Copied");
    } catch {
      getSelection().selectAllChildren(pre.current);
      setState(document.execCommand("copy") ? "Copied" : "Selected: press Ctrl+C");
    }
    setTimeout(() => setState("Copy"), 2000);
  };
  return html`<div class="copy">
    <span>${name}</span> <button type="button" onClick=${copy} aria-label=${`Copy ${name}`}>${state}</button>
    <pre ref=${pre} tabindex="0">${text}</pre>
  </div>`;
}

const MAIN = ["batch_size", "seq_len", "world_size", "packing", "shuffle", "seed"];
let parameters; // of a spec: name, description and schema; asked for once

/** Fields for every parameter of a spec. `onChange` gets the query with the new value, or without one. */
export function SpecForm({ query, onChange, children }) {
  const [known, setKnown] = useState([]);
  useEffect(() => {
    parameters ??= get("openapi.json").then((api) => api.paths["/v1/datasets/{dataset}/spec"].get.parameters.filter((p) => p.in === "query"));
    parameters.then(setKnown, () => (parameters = undefined));
  }, []);
  const field = ({ name, description, schema }) => html`<${Field} key=${name} ...${{ name, description, schema }} value=${query[name]}
    onChange=${(value) => onChange({ ...query, [name]: value })} />`;
  const others = known.filter((p) => !MAIN.includes(p.name));
  const numSet = others.filter((p) => query[p.name]).length;
  return html`<form class="fields" onSubmit=${(event) => event.preventDefault()}>
    ${children}
    ${known.filter((p) => MAIN.includes(p.name)).sort((a, b) => MAIN.indexOf(a.name) - MAIN.indexOf(b.name)).map(field)}
    <details open=${numSet > 0}>
      <summary>All parameters${numSet ? `, ${numSet} set` : ""}</summary>
      <div class="fields">${others.map(field)}</div>
    </details>
  </form>`;
}

/** A labelled input. It reports its value when it is left, or with Enter. */
export function Field({ name, value = "", description, schema = {}, onChange }) {
  const options = schema.enum ?? (schema.type === "boolean" ? ["true", "false"] : null);
  const fallback = schema.default == null ? "" : String(schema.default);
  const [draft, setDraft] = useState(null); // what is being typed; the page may be drawn meanwhile
  const change = (event) => {
    setDraft(null);
    onChange(event.target.value.trim());
  };
  return html`<label title=${description}>
    <span>${name}</span>
    ${options
      ? html`<select aria-label=${name} value=${value} onChange=${change}>
          <option value="">${fallback ? `${fallback} (default)` : "default"}</option>
          ${options.filter((option) => option !== fallback).map((option) => html`<option value=${option}>${option}</option>`)}
        </select>`
      : html`<input aria-label=${name} value=${draft ?? value} placeholder=${fallback} inputmode=${schema.type === "integer" ? "numeric" : "text"}
          onInput=${(event) => setDraft(event.target.value)} onChange=${change} />`}
  </label>`;
}

/** A choice of the datasets and mixtures served. */
export const DatasetField = ({ datasets, value, onChange }) => html`<label>
  <span>dataset</span>
  <select aria-label="dataset" value=${value} onChange=${(event) => onChange(event.target.value)}>
    ${!namesOf(datasets).includes(value) && html`<option value=${value}>${value}</option>`}
    ${namesOf(datasets).map((name) => html`<option value=${name}>${name}</option>`)}
  </select>
</label>`;

export const namesOf = (datasets) => (datasets ? [...datasets.datasets, ...datasets.mixtures].map((dataset) => dataset.name) : []);
