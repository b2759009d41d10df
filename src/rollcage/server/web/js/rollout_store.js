// One rollout, folded from its log as it comes. The server's log is the truth; nothing here is guessed.
import { signal } from "../vendor/preact.js";
import { follow } from "./api.js";
import { SCORED } from "./text.js";
import { Transcript } from "./transcript_fold.js";

export class RolloutStore {
  constructor(id) {
    this.id = id;
    this.version = signal(0);
    this.state = signal("connecting");
    this.problem = signal("");
    /** What the reader opened and closed, by name. */
    this.opened = new Map();
    this.reset();
    this._scheduled = false;
  }

  reset() {
    this.job = null;
    this.createdAt = 0;
    this.reverifies = "";
    this.origin = null;
    this.endedAt = null;
    this.ended = null;
    this.reward = null;
    this.stages = [];
    this.boxes = [];
    this.doing = "";
    this.commands = [];
    this.turns = [];
    this.suspicions = [];
    this.files = null;
    this.agent = null;
    this.agentEnd = null;
    this.aborting = false;
    this.environment = null;
    this.calls = 0;
    this.restarts = 0;
    this.transcript = new Transcript();
    this.live = new Map();
  }

  open() {
    return follow(`/page/rollouts/${encodeURIComponent(this.id)}/events`, {
      onEvent: (event, data) => {
        if (event === "delta") this.hear(data);
        else if (data?.event) this.add(data);
        this.changed();
      },
      onState: (state, error) => {
        this.state.value = state;
        if (error) this.problem.value = error.message;
        // A running turn is told again from its beginning after a new connection.
        if (state === "lost") this.live.clear();
      },
    });
  }

  changed() {
    if (this._scheduled) return;
    this._scheduled = true;
    requestAnimationFrame(() => {
      this._scheduled = false;
      this.version.value += 1;
    });
  }

  hear(delta) {
    if (delta.purpose && delta.purpose !== "agent") return;
    const turn = this.live.get(delta.turn) ?? { content: "", reasoning: "", calls: "", tokens: 0 };
    for (const name of ["content", "reasoning", "calls"]) turn[name] += delta[name] ?? "";
    turn.tokens = delta.tokens ?? turn.tokens;
    if (delta.ended) this.live.delete(delta.turn);
    else this.live.set(delta.turn, turn);
  }

  add({ seq, time, event }) {
    switch (event.kind) {
      case "queued":
        this.job = event.job;
        this.createdAt = time;
        this.reverifies = event.reverifies ?? "";
        this.origin = event.origin ?? null;
        break;
      case "requeued": {
        // Another process begins it anew: what the dead one did is not part of it.
        const { job, createdAt, restarts, reverifies, origin } = this;
        this.reset();
        Object.assign(this, { job, createdAt, reverifies, origin, restarts: restarts + 1 });
        break;
      }
      case "environment_opened":
        this.environment = event;
        break;
      case "tool_called":
        this.calls += 1;
        break;
      case "stage_started":
        this.stages.push({ name: event.stage, from: time, to: null });
        break;
      case "stage_ended": {
        const stage = this.stages.findLast((each) => each.name === event.stage);
        if (stage) stage.to = time;
        break;
      }
      case "progress":
        this.doing = event.message;
        break;
      case "box_opened":
        this.doing = "";
        this.boxes.push(event);
        break;
      case "command_started":
        this.commands.push({ stage: event.stage, command: event.command, result: null, from: time });
        break;
      case "command_ended": {
        const running = this.commands.findLast((each) => !each.result && each.stage === event.stage);
        if (running) running.result = event.result;
        break;
      }
      case "agent_started":
        this.agent = event;
        break;
      case "agent_event":
        this.transcript.add(event.event);
        break;
      case "agent_ended":
        this.agentEnd = event;
        this.live.clear();
        break;
      case "turn_ended":
        this.turns.push({ ...event.turn, seq });
        this.live.delete(event.turn.index);
        break;
      case "suspicion":
        this.suspicions.push(event);
        break;
      case "files_collected":
        this.files = event;
        break;
      case "scored":
        this.reward = event.reward;
        break;
      case "abort_requested":
        this.aborting = true;
        break;
      case "ended":
        this.ended = event;
        this.endedAt = time;
        if (!SCORED.includes(event.outcome)) this.reward = null;
        for (const stage of this.stages) stage.to ??= time;
        break;
      default:
        break;
    }
  }
}
