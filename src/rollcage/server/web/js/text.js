// Numbers and times as people read them. Formatters are made once: making one costs more than drawing a row.

const NUMBER = new Intl.NumberFormat("en");
const CLOCK = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
const TIME = new Intl.DateTimeFormat(undefined, { hour: "numeric", minute: "2-digit" });
const DAY = new Intl.DateTimeFormat(undefined, { month: "short", day: "numeric", hour: "numeric", minute: "2-digit" });

/** What a rollout came to, by its reward where it has one: views colour by it. The same as `Standing.of` in Python. */
export function standing({ outcome, reward }) {
  if (!outcome) return "running";
  if (reward === null) return FINISHED.includes(outcome) ? "unscored" : "broken";
  return reward >= 1 ? "passed" : reward > 0 ? "partial" : "failed";
}

/** The agent ended by itself; older logs have the second word. */
const FINISHED = ["finished", "succeeded"];
/** The outcomes that can carry a reward. */
export const SCORED = [...FINISHED, "agent_timeout", "agent_failed", "limit_reached"];

/** What goes on in each stage. */
export const DOING = { queued: "queued", provision: "opening a box", setup: "setting up", agent: "agent at work", verify: "verifying" };

export const words = (name) => String(name ?? "").replaceAll("_", " ");

export function reward(value) {
  if (value === null || value === undefined) return "–";
  return Number.isInteger(value) ? String(value) : value.toFixed(Math.abs(value) < 0.1 ? 3 : 2);
}

/** Every digit of it. */
export const exact = (number) => NUMBER.format(number);

/** As many digits as fit a column. */
export function count(number) {
  if (number === null || number === undefined) return "–";
  if (number < 10_000) return NUMBER.format(number);
  if (number < 999_500) return `${(number / 1000).toFixed(number < 99_950 ? 1 : 0)}k`;
  return `${(number / 1_000_000).toFixed(1)}M`;
}

export const plural = (number, one, many = `${one}s`) => `${exact(number)} ${number === 1 ? one : many}`;

export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value < 0.001) return "0 ms";
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  if (value < 59.5) return `${value.toFixed(value < 9.95 ? 1 : 0)} s`;
  const whole = Math.round(value);
  if (whole < 3600) return whole % 60 ? `${Math.floor(whole / 60)} min ${whole % 60} s` : `${whole / 60} min`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

export function age(then, now) {
  if (!then) return "–";
  const past = Math.max(0, now - then);
  if (past < 60) return `${Math.floor(past)} s`;
  if (past < 3600) return `${Math.floor(past / 60)} min`;
  if (past < 86400) return `${Math.floor(past / 3600)} h`;
  return `${Math.floor(past / 86400)} d`;
}

/** In the reader's own time zone, to the second. */
export const clock = (then) => (then ? CLOCK.format(then * 1000) : "");

/** As short as it can be told from now: the hour, and the day where that was another one. */
export function when(then, now) {
  const same = new Date(then * 1000).toDateString() === new Date(now * 1000).toDateString();
  return (same ? TIME : DAY).format(then * 1000);
}

export function clip(text, most) {
  // A long text is cut before it is searched: only its beginning is shown.
  const line = String(text ?? "").slice(0, most * 4).replace(/\s+/g, " ").trim();
  return line.length > most ? `${line.slice(0, most - 1)}…` : line;
}
