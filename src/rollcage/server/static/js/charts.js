// Small pictures, drawn as SVG.
import { html } from "../vendor/preact.js";
import { clock, reward, words } from "./text.js";

const TONES = ["good", "warn", "dull", "bad", "busy"];

/** Ended rollouts per stretch of time, stacked by how they ended. */
export function Throughput({ rows, now, toneOf }) {
  const BARS = 48;
  const ended = rows.filter((row) => row.finished_at);
  const oldest = ended.length ? Math.min(...ended.slice(0, 2000).map((row) => row.finished_at)) : now - 60;
  const step = niceStep((now - Math.max(oldest, now - 86_400)) / BARS);
  const end = Math.ceil(now / step) * step;
  const start = end - BARS * step;
  const bars = Array.from({ length: BARS }, () => ({}));
  for (const row of ended) {
    const place = Math.floor((row.finished_at - start) / step);
    if (place < 0 || place >= BARS) continue;
    const name = toneOf(row);
    bars[place][name] = (bars[place][name] ?? 0) + 1;
  }
  const sums = bars.map((bar) => Object.values(bar).reduce((a, b) => a + b, 0));
  const highest = Math.max(1, ...sums);
  const label = `Rollouts ended in each ${stepName(step)}: at most ${highest}`;
  return html`<figure class="chart">
    <figcaption>Ended per ${stepName(step)}<span>${highest} at most</span></figcaption>
    <svg viewBox="0 0 ${BARS * 10} 60" preserveAspectRatio="none" role="img" aria-label=${label}>
      ${bars.map((bar, index) => {
        let y = 60;
        return TONES.map((name) => {
          const height = ((bar[name] ?? 0) / highest) * 58;
          y -= height;
          return height > 0 && html`<rect class=${name} x=${index * 10 + 1} y=${y} width="8" height=${height} rx="1" />`;
        });
      })}
      <line x1="0" x2=${BARS * 10} y1="60" y2="60" class="axis" />
    </svg>
    <div class="ends"><span>${clock(start)}</span><span>now</span></div>
  </figure>`;
}

function niceStep(seconds) {
  return [1, 5, 15, 60, 300, 900, 1800].find((step) => step >= seconds) ?? 3600;
}

function stepName(step) {
  if (step < 60) return step === 1 ? "second" : `${step} s`;
  return step === 60 ? "minute" : step < 3600 ? `${step / 60} min` : "hour";
}

/** How they ended, as one bar with a legend. */
export function Outcomes({ rows, toneOf }) {
  const counts = new Map();
  for (const row of rows) {
    const name = row.outcome ?? "running";
    const found = counts.get(name) ?? { name, tone: toneOf(row), count: 0 };
    found.count += 1;
    counts.set(name, found);
  }
  const sorted = [...counts.values()].sort((a, b) => b.count - a.count);
  const total = Math.max(1, rows.length);
  return html`<figure class="chart">
    <figcaption>Outcomes<span>${rows.length.toLocaleString("en")} in all</span></figcaption>
    <div class="share" role="img" aria-label=${sorted.map((each) => `${words(each.name)} ${each.count}`).join(", ")}>
      ${sorted.map(
        (each) => html`<i class=${each.tone} style=${{ width: `${(each.count / total) * 100}%` }}></i>`,
      )}
    </div>
    <ul class="legend">
      ${sorted
        .slice(0, 6)
        .map((each) => html`<li><i class=${each.tone}></i>${words(each.name)} <b>${each.count.toLocaleString("en")}</b></li>`)}
    </ul>
  </figure>`;
}

/** The rewards of one task's rollouts on a line from the least to the most. */
export function Spread({ rewards, low = 0, high = 1 }) {
  const known = rewards.filter((value) => value !== null);
  const from = Math.min(low, ...known);
  const to = Math.max(high, ...known);
  const bins = new Map();
  for (const value of known) {
    const place = Math.round(((value - from) / (to - from || 1)) * 30);
    bins.set(place, (bins.get(place) ?? 0) + 1);
  }
  const most = Math.max(1, ...bins.values());
  const mean = known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
  const label = known.length
    ? `${known.length} rewards from ${reward(Math.min(...known))} to ${reward(Math.max(...known))}, mean ${reward(mean)}`
    : "no rewards yet";
  return html`<svg class="spread" viewBox="-4 0 158 28" role="img" aria-label=${label}>
    <line x1="0" x2="150" y1="22" y2="22" class="axis" />
    ${[...bins].map(
      ([place, number]) =>
        html`<line x1=${place * 5} x2=${place * 5} y1="22" y2=${22 - 4 - (number / most) * 15} class="stem" />`,
    )}
    ${mean !== null && html`<path class="mean" d=${`M${((mean - from) / (to - from || 1)) * 150 - 4} 28l4 -5l4 5z`} />`}
  </svg>`;
}
