// Numbers and times as people read them.

export const STAGES = ["queued", "provision", "setup", "agent", "verify", "ended"];

/** Good, neutral, bad or busy: how an outcome is coloured. */
export function tone(row) {
  if (!row.outcome) return "busy";
  if (row.outcome === "succeeded") return row.reward === null || row.reward > 0 ? "good" : "dull";
  if (row.outcome === "aborted") return "dull";
  return ["agent_timeout", "limit_reached", "agent_failed"].includes(row.outcome) ? "warn" : "bad";
}

export const words = (name) => String(name ?? "").replaceAll("_", " ");

export function reward(value) {
  if (value === null || value === undefined) return "–";
  return Number.isInteger(value) ? String(value) : value.toFixed(Math.abs(value) < 0.1 ? 3 : 2);
}

export function count(number) {
  if (number === null || number === undefined) return "–";
  if (number < 10_000) return number.toLocaleString("en");
  if (number < 1_000_000) return `${(number / 1000).toFixed(number < 100_000 ? 1 : 0)}k`;
  return `${(number / 1_000_000).toFixed(1)}M`;
}

export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value < 0.001) return "0 ms";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 60) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  const whole = Math.round(value);
  if (whole < 3600) return `${Math.floor(whole / 60)} m ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} m`;
}

export function age(then, now) {
  const past = Math.max(0, now - then);
  if (past < 60) return `${Math.floor(past)} s`;
  if (past < 3600) return `${Math.floor(past / 60)} min`;
  if (past < 86400) return `${Math.floor(past / 3600)} h`;
  return `${Math.floor(past / 86400)} d`;
}

export const clock = (then) =>
  new Date(then * 1000).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" });

export function clip(text, most) {
  const line = String(text ?? "").replace(/\s+/g, " ").trim();
  return line.length > most ? `${line.slice(0, most - 1)}…` : line;
}
