// Plots by uPlot, and the heat map of waits on a canvas. Both follow the width of the page and its colours.
import { html, useEffect, useRef, useState } from "./vendor/preact.module.js";
import { clock, compact } from "./format.js";

const dark = matchMedia("(prefers-color-scheme: dark)");
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** The width of an element, and a number that changes with the colours. */
function useLook(element) {
  const [width, setWidth] = useState(0);
  const [look, setLook] = useState(0);
  useEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    observer.observe(element.current);
    const onColors = () => setLook((before) => before + 1);
    dark.addEventListener("change", onColors);
    return () => {
      observer.disconnect();
      dark.removeEventListener("change", onColors);
    };
  }, []);
  return [width, look];
}

/**
 * A plot of one or more series over shared x values.
 * series: [{name, values, color, format, bars, points}]; x: {values, format, isTime}
 */
export function Plot({ title, x, series, height = 140, max, note }) {
  const box = useRef();
  const [width, look] = useLook(box);
  const data = JSON.stringify([x.values, series.map((one) => one.values)]);
  useEffect(() => {
    if (!width) return;
    const axis = { stroke: color("quiet"), grid: { stroke: color("line"), width: 1 }, ticks: { stroke: color("line") }, font: "12px system-ui" };
    const shownX = x.format ?? clock;
    const format = series[0].format ?? compact;
    const plot = new uPlot(
      {
        width, height, padding: [8, 8, 0, 0],
        cursor: { drag: { x: false, y: false } },
        legend: { live: true },
        scales: { x: { time: false, range: x.range }, y: { range: (_, low, high) => [Math.min(0, low), max ?? (high > 0 ? high * 1.1 : 1)] } },
        axes: [
          { ...axis, space: 70, size: 32, values: (_, ticks) => ticks.map((tick) => shownX(tick)), ...(x.incrs && { incrs: x.incrs }) },
          { ...axis, size: 72, values: (_, ticks) => ticks.map((tick) => format(tick)) },
        ],
        series: [
          { label: x.name ?? "time", value: (_, value) => (value == null ? "–" : (x.long ?? shownX)(value)) },
          ...series.map((one, at) => ({
            label: one.name,
            stroke: color(one.color ?? `series-${at + 1}`),
            fill: one.bars ? color(one.color ?? `series-${at + 1}`) : undefined,
            width: 2,
            dash: at ? [6, 3] : undefined,
            paths: one.points ? () => null : one.bars ? uPlot.paths.bars({ size: [0.9], align: 1 }) : undefined,
            points: one.points ? { show: true, size: 4, fill: color(one.color ?? `series-${at + 1}`) } : { show: false },
            value: (_, value) => (value == null ? "–" : (one.format ?? compact)(value)),
          })),
        ],
      },
      [x.values, ...series.map((one) => one.values)],
      box.current,
    );
    return () => plot.destroy();
  }, [data, width, look, height]);
  return html`<figure class="plot">
    <figcaption>${title}${note && html` <span class="quiet">${note}</span>`}</figcaption>
    <div ref=${box}></div>
  </figure>`;
}

// After cividis, which reads alike with all kinds of colour vision, and in grey. A short wait is close to the page's colour.
const LIGHT = ["#eef0ec", "#efe6b8", "#e8d359", "#cbba69", "#b0a473", "#958f78", "#7c7b78", "#666970", "#4f576c", "#31446b", "#00204d"];
const DARK = ["#232a35", "#1f3764", "#31446b", "#4f576c", "#666970", "#7c7b78", "#958f78", "#b0a473", "#cbba69", "#e8d359", "#ffea46"];
const COLUMNS = 120;
const WAITING = 5; // percent; ranks above it have their label in any case

/** The colour of a percentage: small waits matter, so the scale is that of its root. */
const shade = (value) => (dark.matches ? DARK : LIGHT)[Math.round(Math.sqrt(Math.min(100, value) / 100) * (LIGHT.length - 1))];

/**
 * A heat map of ranks x time of the percentage that a rank waits; arrow keys and the pointer read a cell, a click chooses a rank.
 * rows: [{rank, history}] with 120 values each; null where a rank reported nothing
 */
export function HeatMap({ rows, end, seconds, chosen, onChoose }) {
  const box = useRef();
  const canvas = useRef();
  const [width, look] = useLook(box);
  const [cell, setCell] = useState(null);
  const perLine = Math.ceil(rows.length / 256); // a thousand ranks fit a screen
  const lines = [];
  for (let at = 0; at < rows.length; at += perLine) lines.push(rows.slice(at, at + perLine));
  const lineHeight = Math.max(2, Math.min(18, Math.floor(360 / lines.length)));
  const [left, top] = [44, 6];
  const height = top + lines.length * lineHeight;
  const timeAt = (column) => end - (COLUMNS - 1 - column) * seconds;
  const valueAt = (line, column) => {
    const values = line.map((row) => row.history[column]).filter((value) => value != null);
    return values.length ? Math.max(...values) : null;
  };
  useEffect(() => {
    if (!width) return;
    const scale = devicePixelRatio || 1;
    const element = canvas.current;
    element.width = width * scale;
    element.height = (height + 26) * scale;
    const context = element.getContext("2d");
    context.scale(scale, scale);
    const cellWidth = (width - left) / COLUMNS;
    context.font = "12px system-ui";
    context.textBaseline = "middle";
    const apart = Math.ceil(14 / lineHeight); // lines from one label to the next
    const waiting = lines.map((line) => valueAt(line, COLUMNS - 1) > WAITING);
    lines.forEach((line, at) => {
      const isFree = at % apart === 0 && !waiting.slice(Math.max(0, at - apart + 1), at + apart).some(Boolean);
      context.fillStyle = color(waiting[at] ? "wait" : "quiet");
      if (waiting[at] || isFree) context.fillText(`${waiting[at] ? "▲" : ""}${line[0].rank}`, 2, top + (at + 0.5) * lineHeight);
      for (let column = 0; column < COLUMNS; column++) {
        const value = valueAt(line, column);
        if (value == null) continue;
        context.fillStyle = shade(value);
        context.fillRect(left + column * cellWidth, top + at * lineHeight, Math.ceil(cellWidth), lineHeight - (lineHeight > 4 ? 1 : 0));
      }
    });
    context.fillStyle = color("quiet");
    for (const column of [0, 40, 80]) context.fillText(clock(timeAt(column)), left + column * cellWidth, height + 16);
    context.textAlign = "right";
    context.fillText(clock(end), width, height + 16);
    if (cell) {
      context.strokeStyle = color("text");
      context.lineWidth = 2;
      context.strokeRect(left + cell.column * cellWidth, top + cell.line * lineHeight, cellWidth, lineHeight);
    }
  });
  const find = (event) => {
    const at = canvas.current.getBoundingClientRect();
    const column = Math.floor(((event.clientX - at.left - left) / (width - left)) * COLUMNS);
    const line = Math.floor((event.clientY - at.top - top) / lineHeight);
    return lines[line] && column >= 0 && column < COLUMNS ? { line, column } : null;
  };
  const onKey = (event) => {
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    const at = cell ?? { line: 0, column: COLUMNS - 1 };
    if (event.key === "Enter") onChoose(lines[at.line][0].rank);
    if (!steps) return;
    event.preventDefault();
    const clamp = (value, last) => Math.max(0, Math.min(last, value));
    setCell({ line: clamp(at.line + steps[0], lines.length - 1), column: clamp(at.column + steps[1], COLUMNS - 1) });
  };
  const read = () => {
    const at = cell && lines[cell.line] ? cell : null;
    if (!at) return "Point at a cell, or use the arrow keys, to read it. A click chooses a rank.";
    const line = lines[at.line];
    const ranks = line.length > 1 ? `ranks ${line[0].rank} to ${line.at(-1).rank}, the longest wait` : `rank ${line[0].rank}`;
    const value = valueAt(line, at.column);
    return `${ranks}, ${clock(timeAt(at.column) - seconds)}–${clock(timeAt(at.column))}: ${value == null ? "no report" : `waits ${value} %`}`;
  };
  return html`<div class="heat" ref=${box}>
    <p class="legend quiet">
      wait: ${[0, 5, 25, 50, 100].map((value) => html`<span class="swatch" style=${{ background: shade(value) }}></span> ${value} % `)}
      ${perLine > 1 && `${perLine} ranks a line, the longest wait of them`}
    </p>
    <canvas ref=${canvas} tabindex="0" role="img" aria-label=${`Wait of ${rows.length} ranks in the last hour. ${read()}`}
      style=${{ width: `${width}px`, height: `${height + 26}px` }}
      onMouseMove=${(event) => setCell(find(event))} onMouseLeave=${() => setCell(null)} onKeyDown=${onKey}
      onClick=${(event) => { const at = find(event); if (at) onChoose(lines[at.line][0].rank); }}></canvas>
    <p class="readout" aria-live="polite">${read()}</p>
  </div>`;
}

/** A value beside a range, as in the shuffle report. */
export function Range({ value, low, high, expected }) {
  const top = Math.max(value, high, expected) * 1.15 || 1;
  const at = (number) => `${(100 * number) / top}%`;
  return html`<span class="range" role="img" aria-label=${`${compact(value)}; a uniform shuffle gives ${compact(low)} to ${compact(high)}`}>
    <span class="usual" style=${{ left: at(low), width: at(Math.max(high - low, top / 200)) }}></span>
    <span class="value" style=${{ left: at(value) }}></span>
  </span>`;
}

