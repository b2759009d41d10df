// Small pictures, drawn as SVG.
import { html } from "../vendor/preact.js";
import { exact, reward, standing, when, words } from "./text.js";

// From the best to the worst; each has a colour of its own in the sheet.
const STANDINGS = ["passed", "partial", "failed", "unscored", "running"];
/** What a rollout is counted as: its standing; where it broke, the outcome that says how. */
const resultOf = (row) => (standing(row) === "broken" ? row.outcome : standing(row));
const colour = (name) => (STANDINGS.includes(name) ? `o-${name}` : "o-broken");
const rank = (name) => (STANDINGS.includes(name) ? STANDINGS.indexOf(name) : STANDINGS.length);

const BARS = 48;
const STEPS = [1, 2, 5, 10, 15, 20, 30, 60, 120, 180, 300, 600, 900, 1200, 1800, 3600];

/** Ended rollouts per stretch of time, stacked by what they came to. */
export function Throughput({ rows, now }) {
  const ended = rows.filter((row) => row.finished_at);
  let oldest = now - 60;
  for (const row of ended) if (row.finished_at < oldest) oldest = row.finished_at;
  const wanted = (now - Math.max(oldest, now - 86_400)) / (BARS - 1);
  const step = STEPS.find((each) => each >= wanted) ?? 3600;
  const end = Math.ceil(now / step) * step;
  const start = end - BARS * step;
  const bars = Array.from({ length: BARS }, () => new Map());
  for (const row of ended) {
    const place = Math.floor((row.finished_at - start) / step);
    if (place >= 0 && place < BARS) bars[place].set(resultOf(row), (bars[place].get(resultOf(row)) ?? 0) + 1);
  }
  const sums = bars.map((bar) => [...bar.values()].reduce((a, b) => a + b, 0));
  const highest = Math.max(1, ...sums);
  const label = `Rollouts ended in each ${stepName(step)}: at most ${highest}`;
  return html`<figure class="chart">
    <figcaption>Ended per ${stepName(step)}<span>peak ${exact(highest)}</span></figcaption>
    <svg viewBox="0 0 ${BARS * 10} 60" preserveAspectRatio="none" role="img" aria-label=${label}>
      ${bars.map((bar, index) => {
        if (!sums[index]) return null;
        let y = 60;
        const told = [...bar].map(([name, number]) => `${words(name)} ${number}`).join(", ");
        return html`<g><title>${when(start + index * step, now)}: ${told}</title>
          <rect class="air" x=${index * 10} y="0" width="10" height="60" />
          ${[...bar].sort(([a], [b]) => rank(a) - rank(b)).map(([name, number]) => {
            const height = (number / highest) * 58;
            y -= height;
            return html`<rect class=${colour(name)} x=${index * 10 + 1} y=${y} width="8" height=${height} />`;
          })}
        </g>`;
      })}
      <line x1="0" x2=${BARS * 10} y1="60" y2="60" class="axis" />
    </svg>
    <div class="ends"><span>${when(start, now)}</span><span>now</span></div>
  </figure>`;
}

function stepName(step) {
  if (step < 60) return step === 1 ? "second" : `${step} s`;
  return step === 60 ? "minute" : step < 3600 ? `${step / 60} min` : "hour";
}

function counted(rows) {
  const counts = new Map();
  for (const row of rows) counts.set(resultOf(row), (counts.get(resultOf(row)) ?? 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1]);
}

/** What rollouts came to, as one bar. */
export function Share({ rows }) {
  const counts = counted(rows);
  const told = counts.map(([name, number]) => `${words(name)} ${number}`).join(", ");
  return html`<div class="share" role="img" aria-label=${told} title=${told}>
    ${counts.map(([name, number]) => html`<i class=${colour(name)} style=${{ flexGrow: number }}></i>`)}
  </div>`;
}

/** The same with a legend. */
export function Outcomes({ rows }) {
  return html`<figure class="chart">
    <figcaption>Results<span>${exact(rows.length)} in all</span></figcaption>
    <${Share} rows=${rows} />
    <ul class="legend">
      ${counted(rows)
        .slice(0, 7)
        .map(([name, number]) => html`<li><i class=${colour(name)}></i>${words(name)} <b>${exact(number)}</b></li>`)}
    </ul>
  </figure>`;
}

/** The rewards of one task's rollouts on a line from the least to the most, with their mean below it. */
export function Spread({ rewards, open = 0, low = 0, high = 1 }) {
  const known = rewards.filter((value) => value !== null);
  if (!known.length) return html`<small class="spread">${open ? "not scored yet" : "not scored"}</small>`;
  const from = Math.min(low, ...known);
  const to = Math.max(high, ...known);
  const bins = new Map();
  for (const value of known) {
    const place = Math.round(((value - from) / (to - from || 1)) * 30);
    bins.set(place, (bins.get(place) ?? 0) + 1);
  }
  const most = Math.max(1, ...bins.values());
  const mean = known.reduce((a, b) => a + b, 0) / known.length;
  const label = `${known.length} rewards from ${reward(Math.min(...known))} to ${reward(Math.max(...known))}, mean ${reward(mean)}`;
  return html`<svg class="spread" viewBox="-18 0 186 28" role="img" aria-label=${label}>
    <title>${label}</title>
    <text x="-7" y="25" text-anchor="end">${reward(from)}</text><text x="157" y="25">${reward(to)}</text>
    <line x1="0" x2="150" y1="22" y2="22" class="axis" />
    ${[...bins].map(
      ([place, number]) =>
        html`<line x1=${place * 5} x2=${place * 5} y1="22" y2=${22 - 4 - (number / most) * 15} class="stem" />`,
    )}
    <path class="mean" d=${`M${((mean - from) / (to - from || 1)) * 150 - 4} 28l4 -5l4 5z`} />
  </svg>`;
}

const PLACES = 5;
const BAR = ["failed", "failed", "partial", "partial", "passed"];

/** A cell's rewards as five bars from least to most, with what broke and what is awaited beside them. */
export function Mini({ rewards, broken, waiting }) {
  const bars = Array.from({ length: PLACES }, () => 0);
  for (const value of rewards) bars[value >= 1 ? 4 : value <= 0 ? 0 : 1 + Math.min(2, Math.floor(value * 3))] += 1;
  const most = Math.max(1, ...bars, broken, waiting);
  const bar = (number, at, name) => number > 0 && html`<rect class=${name} x=${at * 12 + 1} y=${20 - Math.max(3, (number / most) * 19)} width="10" height=${Math.max(3, (number / most) * 19)} />`;
  return html`<svg class="mini" viewBox="0 0 92 22" aria-hidden="true"><line x1="0" x2="60" y1="20.5" y2="20.5" class="axis" />${bars.map((number, at) => bar(number, at, at > 0 && at < 4 ? "o-partial" : `o-${BAR[at]}`))}${bar(broken, 5.4, "o-broken")}${bar(waiting, 6.5, "o-waiting")}</svg>`;
}

/** A mean and the interval around it, on a line from `from` to 1. */
export function Interval({ low, mean, high, from = 0, wide = false }) {
  if (mean === null || mean === undefined) return null;
  const least = Math.min(from, low ?? mean, mean);
  const most = Math.max(1, high ?? mean, mean);
  const at = (value) => ((value - least) / (most - least || 1)) * 100;
  const label = low === null || low === undefined ? `mean ${reward(mean)}` : `mean ${reward(mean)}, 95 % from ${reward(low)} to ${reward(high)}`;
  return html`<svg class="interval ${wide ? "wide" : ""}" viewBox="-3 0 106 14" preserveAspectRatio="none" role="img" aria-label=${label}><title>${label}</title>
    <line x1="0" x2="100" y1="7" y2="7" class="axis" />${least < 0 && html`<line x1=${at(0)} x2=${at(0)} y1="0" y2="14" class="axis" />`}
    ${low !== null && low !== undefined && html`<line x1=${at(low)} x2=${at(high)} y1="7" y2="7" class="span" />`}
    <line x1=${at(mean)} x2=${at(mean)} y1="2" y2="12" class="point" />
  </svg>`;
}
