// Numbers, times and hostile text, as people read them.
import { html } from "./vendor/preact.module.js";

const number = new Intl.NumberFormat("en");
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const NONE = "–";

export const num = (value) => (value == null ? NONE : number.format(value));

/** A number in few digits: 0.0034, 26.4, 1.02M. */
export function compact(value) {
  if (value == null) return NONE;
  if (value !== 0 && Math.abs(value) < 1) return String(Number(value.toPrecision(2)));
  if (value < 100) return String(Number(value.toFixed(1)));
  return value < 10000 ? number.format(Math.round(value)) : short.format(value);
}

/** A fraction as a percentage, with a digit after the point only below 10 %. */
export function percent(fraction) {
  if (fraction == null) return NONE;
  const value = 100 * fraction;
  return `${value && Math.abs(value) < 9.95 ? value.toFixed(1) : Math.round(value)} %`;
}

export function bytes(value) {
  if (value == null) return NONE;
  for (const [unit, size] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6]]) {
    if (value >= size) return `${(value / size).toFixed(1)} ${unit}`;
  }
  return value < 1000 ? `${Math.round(value)} B` : `${(value / 1e3).toFixed(1)} kB`;
}

export function duration(seconds) {
  if (seconds == null) return NONE;
  const s = Math.round(seconds);
  if (s < 60) return `${s} s`;
  if (s < 600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

export const clock = (time) => new Date(1000 * time).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });

/** "21:04, 12 min ago"; both times are the server's. */
export const since = (time, now) => (time == null ? NONE : `${clock(time)}, ${duration(Math.max(0, now - time))} ago`);

// Characters that a browser would obey or hide: controls, direction, width 0, tags and lone surrogates. Joiners are left, since
// scripts and emoji need them.
const HIDDEN =
  /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\u{e0000}-\u{e0fff}]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/gu;
const MARKS = { "\n": "↵\n", "\t": "→\t" };

function mark(character) {
  const code = character.codePointAt(0);
  if (MARKS[character]) return MARKS[character];
  return `<U+${code.toString(16).toUpperCase().padStart(4, "0")}>`;
}

/** Text of the data as text nodes, with hidden characters spelled out and its direction kept to itself. */
export function shown(text) {
  const parts = [];
  let end = 0;
  for (const match of String(text).matchAll(HIDDEN)) {
    if (match.index > end) parts.push(text.slice(end, match.index));
    parts.push(html`<span class="hidden-char">${mark(match[0])}</span>`);
    end = match.index + match[0].length;
  }
  return html`<bdi>${[...parts, String(text).slice(end)]}</bdi>`;
}
