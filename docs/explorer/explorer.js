/* The page "Try a schedule": simulates and draws the rows that site_hooks.py wrote.

   Rows are lists of actions per rank, as jpipe.schedules prints them: "0F2" is the forward of
   stage 0 on micro-batch 2. As in jpipe's own simulator, a rank runs its actions in order, and each
   starts once what it reads has ended, and has arrived if another rank made it. */

"use strict";

const NAMES = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient" };

/** The actions of a text: one list per rank. */
function parseRows(text) {
  return text.split("/").map((row) =>
    row.split(" ").map((action) => {
      const [, stage, op, microbatch] = /^(\d+)([FBIW])(\d+)$/.exec(action);
      return { name: action, op, stage: Number(stage), microbatch: Number(microbatch) };
    }),
  );
}

/** What an action reads: names of actions of its own stage, and of the stages beside it. */
function namesOfNeeds({ op, stage, microbatch }, isSplit, numStages) {
  const backward = isSplit ? "I" : "B";
  if (op === "F") return stage > 0 ? [`${stage - 1}F${microbatch}`] : [];
  if (op === "W") return [`${stage}I${microbatch}`];
  const needs = [`${stage}F${microbatch}`];
  if (stage + 1 < numStages) needs.push(`${stage + 1}${backward}${microbatch}`);
  return needs;
}

/** Start and end of each action, and the most micro-batches that each rank stores at once.

    @param rows lists of actions, one per rank.
    @param costs the times of all stages of a rank: {forward, backward}, and of a {transfer}. */
function simulate(rows, costs) {
  const actions = rows.flat();
  const numStages = 1 + Math.max(...actions.map((action) => action.stage));
  const chunks = numStages / rows.length;
  const rankOf = new Map();
  rows.forEach((row, rank) => row.forEach((action) => rankOf.set(action.name, rank)));
  // Some schedules split the backwards of some micro-batches only.
  const isSplit = (stage, microbatch) => rankOf.has(`${stage}I${microbatch}`);
  const half = costs.backward / 2;
  const times = { F: costs.forward, B: costs.backward, I: half, W: half };

  const ends = new Map();
  const timeline = rows.map(() => []);
  const free = rows.map(() => 0);
  const arrival = (name, rank) =>
    ends.has(name) ? ends.get(name) + (rankOf.get(name) === rank ? 0 : costs.transfer) : Infinity;

  for (let numLeft = actions.length; numLeft > 0;) {
    const numBefore = numLeft;
    rows.forEach((row, rank) => {
      while (timeline[rank].length < row.length) {
        const action = row[timeline[rank].length];
        const splits = isSplit(action.stage + 1, action.microbatch);
        const needs = namesOfNeeds(action, splits, numStages);
        const start = Math.max(free[rank], ...needs.map((name) => arrival(name, rank)));
        if (start === Infinity) break;
        const end = start + times[action.op] / chunks;
        ends.set(action.name, end);
        free[rank] = end;
        timeline[rank].push({ ...action, start, end });
        numLeft -= 1;
      }
    });
    if (numLeft === numBefore) throw new Error("the schedule deadlocks");
  }

  const makespan = Math.max(...free);
  const busy = timeline.flat().reduce((sum, action) => sum + action.end - action.start, 0);
  return {
    timeline,
    makespan,
    chunks,
    bubble: 1 - busy / (makespan * rows.length),
    peaks: timeline.map((row) => peak(row) / chunks),
  };
}

/** The most stages of micro-batches that a rank stores between forward and backward. */
function peak(row) {
  let stored = 0;
  let most = 0;
  for (const { op } of row) {
    if (op === "F") stored += 1;
    if (op === "B" || op === "W") stored -= 1;
    most = Math.max(most, stored);
  }
  return most;
}

if (typeof module !== "undefined") module.exports = { parseRows, simulate };

/* --------------------------------------------------------------------------------- the page */

const ROW = 26;
const GAP = 6;
const LEFT = 52;

/** An element of SVG. */
function draw(parent, tag, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

/** Draws simulated schedules below each other, on one scale of time. */
function drawAll(frame, simulated) {
  const longest = Math.max(...simulated.map(({ makespan }) => makespan));
  const shortest = Math.min(
    ...simulated.flatMap(({ timeline }) => timeline.flat()).map(({ start, end }) => end - start),
  );
  const width = Math.max(frame.clientWidth - LEFT - 8, Math.min((12 * longest) / shortest, 4000));
  frame.replaceChildren();
  for (const result of simulated) {
    const title = document.createElement("p");
    title.textContent = describe(result);
    frame.append(title);
    drawOne(frame, result, width, width / longest);
  }
}

function drawOne(frame, result, width, scale) {
  const svg = draw(frame, "svg", {
    width: LEFT + width + 8,
    height: result.timeline.length * (ROW + GAP),
    role: "img",
    "aria-label": describe(result),
  });
  result.timeline.forEach((row, rank) => {
    const y = rank * (ROW + GAP);
    draw(svg, "text", { x: 0, y: y + 17 }, `rank ${rank}`);
    draw(svg, "rect", { x: LEFT, y, width: result.makespan * scale, height: ROW, class: "idle" });
    for (const action of row) {
      const x = LEFT + action.start * scale;
      const boxWidth = (action.end - action.start) * scale;
      const chunk = Math.floor(action.stage / result.timeline.length);
      const box = draw(svg, "rect", {
        x, y, width: boxWidth, height: ROW, class: `${action.op} ${chunk > 0 ? "later" : ""}`,
      });
      const times = `${format(action.start)} to ${format(action.end)}`;
      draw(box, "title", {}, `${action.name}: ${NAMES[action.op]} of stage ${action.stage} on `
        + `micro-batch ${action.microbatch}, ${times}`);
      const number = String(action.microbatch);
      if (boxWidth > 7 * number.length + 3) {
        draw(svg, "text", {
          x: x + boxWidth / 2, y: y + 17, class: `number on-${action.op}`,
        }, number);
      }
    }
  });
}

function format(value) {
  return String(Math.round(100 * value) / 100);
}

function describe({ name, makespan, bubble, peaks }) {
  const stored = Math.min(...peaks) === Math.max(...peaks)
    ? format(peaks[0])
    : peaks.map(format).join(", ");
  return `${name}: time ${format(makespan)}, idle ${(100 * bubble).toFixed(1)} %, `
    + `stores ${stored} micro-batches`;
}

/** The rows of a schedule, by "ranks x micro-batches". */
const fetched = new Map();
function fetchRows(folder, name) {
  if (!fetched.has(name)) {
    fetched.set(name, fetch(`${folder}${name}.json`).then((response) => response.json()));
  }
  return fetched.get(name);
}

async function start() {
  const form = document.getElementById("explorer");
  if (!form || form.dataset.started) return;
  form.dataset.started = "yes";
  const frame = document.getElementById("explorer-frame");
  const note = document.getElementById("explorer-note");
  const fields = [...form.elements].filter((field) => field.name);
  const chosen = new URLSearchParams(location.hash.slice(1));
  for (const field of fields) if (chosen.has(field.name)) field.value = chosen.get(field.name);

  async function update() {
    const values = Object.fromEntries(fields.map((field) => [field.name, field.value]));
    for (const output of form.querySelectorAll("output")) output.value = values[output.htmlFor];
    history.replaceState(null, "", `#${new URLSearchParams(values)}`);
    const costs = {
      forward: 1, backward: Number(values.backward), transfer: Number(values.transfer),
    };
    const names = [values.schedule, values.other].filter((name) => name);
    const size = `${values.ranks}x${values.microbatches}`;
    const tables = await Promise.all(names.map((name) => fetchRows(form.dataset.rows, name)));
    const simulated = [];
    const notes = [];
    names.forEach((name, index) => {
      const entry = tables[index][size];
      if (entry.rows) simulated.push({ name, ...simulate(parseRows(entry.rows), costs) });
      else notes.push(entry.error);
    });
    note.textContent = notes.join(" ");
    if (simulated.length) drawAll(frame, simulated);
    else frame.replaceChildren();
  }

  form.addEventListener("input", update);
  window.addEventListener("resize", update);
  await update();
}

if (typeof document !== "undefined") {
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
}
