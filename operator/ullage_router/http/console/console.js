"use strict";

const $ = (id) => document.getElementById(id);
const ACTIONS = ["accept", "shrink", "queue", "route4", "reject"];
const KEPT_ROWS = 200;
const SECONDS = 60;

/** What a reason means, for those that newcomers meet. */
const MEANINGS = {
  FITS: "its KV fits",
  LARGE_REQUEST: "large, so it went to the large pool",
  CAPACITY: "only this pool can ever hold it",
  SPILL: "another pool had room",
  KV_HEADROOM: "the engines' free KV memory does not suffice now",
  QUEUE_FULL: "no room, and the queue is full",
  QUEUE_TIMEOUT: "it waited as long as it may",
  DEADLINE: "the answer could not end in time",
  CONTEXT_TOO_LONG: "longer than the model's context",
  KV_NEVER_FITS: "no engine could ever hold it",
  NO_ENGINE: "no engine is ready",
  BREAKER_LIMIT: "requests failed on the engine, so it gets few at once",
  NOT_READY: "no engine is ready yet",
  PRESSURE: "an engine under pressure lowered a limit",
  RATE_LIMIT_EXCEEDED: "the tenant's quota is used up",
  CANCELLED: "the client left",
  ASLEEP: "its pool had to wake first",
};

// Numbers --------------------------------------------------------------------------------------

function bytes(n) {
  if (n === null || n === undefined) return "";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (Math.abs(n) >= 1024 && i < units.length - 1) { n /= 1024; i += 1; }
  return `${n.toFixed(i && n < 100 ? 1 : 0)} ${units[i]}`;
}

function seconds(s) {
  if (!s) return "";
  return s < 1 ? `${Math.round(s * 1000)} ms` : `${s.toFixed(1)} s`;
}

const sum = (values) => values.reduce((a, b) => a + b, 0);
const rate = (n) => (n >= 100 ? n.toFixed(0) : n.toFixed(1));
const percent = (part, whole) => `${Math.round(100 * part / whole)} %`;

/** An element of a tag, its classes and its children or text. */
function make(tag, classes = "", ...children) {
  const element = document.createElement(tag);
  if (classes) element.className = classes;
  element.append(...children);
  return element;
}

function set(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// The API's key ---------------------------------------------------------------------------------

let key = sessionStorage.getItem("key") || "";

const authorized = (headers = {}) => (key ? { ...headers, authorization: `Bearer ${key}` } : headers);

$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  sessionStorage.setItem("key", key);
  $("login").hidden = true;
  wakeUp();
});

// Events: server-sent, read with fetch because EventSource can send no key ------------------------

let wakeUp = () => {};

function pause(ms) {
  return new Promise((resolve) => {
    wakeUp = resolve;
    if (ms < Infinity) setTimeout(resolve, ms);
  });
}

/** Calls a function with the name and the data of each event of a response. */
async function eachEvent(response, onEvent) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      let name = "message", data = "";
      for (const line of block.split("\n")) {
        if (line.startsWith("event: ")) name = line.slice(7);
        if (line.startsWith("data: ")) data += line.slice(6);
      }
      if (data) onEvent(name, data);
    }
  }
}

async function follow() {
  for (let delay = 500; ; delay = Math.min(2 * delay, 5000)) {
    let wait = delay;
    let text = "the router is away; connecting …";
    try {
      const response = await fetch("/console/events", { headers: authorized(), cache: "no-store" });
      if (response.status === 401) {
        $("login").hidden = false;
        link("needs a key", false);
        wait = Infinity;
      } else if (response.ok) {
        link("live", true);
        delay = 250;
        forget();
        await eachEvent(response, (name, data) => {
          if (name === "state") onState(JSON.parse(data));
          if (name === "decisions") onDecisions(JSON.parse(data));
        });
      } else {
        text = (await response.json()).error.message;
      }
    } catch (error) {
      // The router is away: it is asked again below.
    }
    if (wait < Infinity) link(text, false);
    await pause(wait);
  }
}

function link(text, isLive) {
  set($("link"), text);
  $("link").classList.toggle("live", isLive);
}

// State -----------------------------------------------------------------------------------------

const perSecond = [];
let totals = null;

function forget() {
  totals = null;
}

function onState(state) {
  showService(state);
  showEngines(state.engines);
  showQueue(state.queue);
  showRates(state, performance.now());
}

function showService(state) {
  set($("model"), state.model);
  set($("ready"), state.ready ? "ready" : "not ready");
  $("ready").className = `pill ${state.ready ? "accept" : "reject"}`;
  $("ask").hidden = !state.console.chat;
  $("no-chat").hidden = state.console.chat;
  $("overload").hidden = !state.console.local;
  set($("inflight"), `${state.inflight} in flight`);
}

function showQueue(queue) {
  set($("queue"), `${queue.waiting}`);
  set($("queue-most"), ` of ${queue.max_requests}`);
  set($("queue-note"), queue.waiting ? `oldest ${seconds(queue.oldest_s)} · ${bytes(queue.bytes)}` : "nobody waits");
}

/** Counts of decisions by action since the start. */
function counted(decisions) {
  const counts = Object.fromEntries(ACTIONS.map((action) => [action, 0]));
  for (const each of decisions) {
    if (each.action in counts) counts[each.action] += each.count;
  }
  return counts;
}

function showRates(state, now) {
  const counts = counted(state.decisions);
  if (totals) {
    // A router that has restarted counts from 0 again.
    const grown = ACTIONS.map((action) => Math.max(0, counts[action] - totals.counts[action]));
    const elapsed = (now - totals.at) / 1000;
    perSecond.push({ grown, elapsed });
    if (perSecond.length > SECONDS) perSecond.shift();
  }
  totals = { counts, at: now };
  const recent = perSecond.slice(-5);
  const elapsed = sum(recent.map((each) => each.elapsed)) || 1;
  const all = sum(recent.map((each) => sum(each.grown)));
  set($("requests"), rate(all / elapsed));
  set($("refused"), rate(sum(recent.map((each) => each.grown[4])) / elapsed));
  const minute = sum(perSecond.map((each) => each.grown[4]));
  const minuteAll = sum(perSecond.map((each) => sum(each.grown)));
  set($("refused-note"), minute ? `${minute} in a minute, ${percent(minute, minuteAll)}` : "none in the last minute");
  $("refused").closest(".figure").classList.toggle("alarm", minute > 0);
  drawChart();
}

function drawChart() {
  const most = Math.max(4, ...perSecond.map((each) => sum(each.grown)));
  const width = 240 / SECONDS;
  const bars = perSecond.flatMap((each, index) => {
    let y = 56;
    return ACTIONS.flatMap((action, i) => {
      const height = 54 * each.grown[i] / most;
      if (!height) return [];
      const bar = document.createElementNS("http://www.w3.org/2000/svg", "rect");
      y -= height;
      const x = 240 - (perSecond.length - index) * width;
      for (const [name, value] of Object.entries({ class: action, x: x + 0.4, y, width: width - 0.8, height })) bar.setAttribute(name, value);
      return [bar];
    });
  });
  $("chart").replaceChildren(...bars);
}

// Engines ---------------------------------------------------------------------------------------

const engineViews = new Map();

/** The parts of a KV pool in bytes. What is committed is taken of what is free before caches go. */
function parts(engine) {
  const { kv_pool_bytes: pool, kv_free_bytes: free, kv_reclaimable_bytes: reclaimable, kv_committed_bytes: committed } = engine;
  const open = Math.max(0, free - committed);
  const kept = Math.max(0, reclaimable - Math.max(0, committed - free));
  return { used: Math.max(0, pool - free - reclaimable), committed, reclaimable: kept, free: open };
}

function engineView() {
  const view = {
    root: make("div", "engine"),
    name: make("span", "name"), pool: make("span", "chip"), state: make("span", "pill"),
    pressure: make("span", "pill"), free: make("span", "free-text"),
    bar: make("div", "bar"), segments: {}, details: make("div", "details"), trouble: make("p", "trouble"),
  };
  view.bar.setAttribute("role", "img");
  for (const part of ["used", "committed", "reclaimable"]) {
    view.segments[part] = make("i", part);
    view.bar.append(view.segments[part]);
  }
  view.root.append(make("div", "line", view.name, view.pool, view.state, view.pressure, view.free), view.bar, view.details, view.trouble);
  return view;
}

function showEngines(unsorted) {
  const engines = unsorted.toSorted((a, b) => a.pool.localeCompare(b.pool) || a.id.localeCompare(b.id));
  for (const [id, view] of engineViews) {
    if (!engines.some((engine) => engine.id === id)) { view.root.remove(); engineViews.delete(id); }
  }
  for (const engine of engines) {
    if (!engineViews.has(engine.id)) engineViews.set(engine.id, engineView());
    const view = engineViews.get(engine.id);
    $("engines").append(view.root);
    showEngine(view, engine);
  }
  $("no-engines").hidden = engines.length > 0;
  const reporting = engines.filter((engine) => engine.kv_pool_bytes);
  const pool = sum(reporting.map((engine) => engine.kv_pool_bytes));
  const headroom = sum(reporting.map((engine) => engine.headroom_bytes));
  set($("headroom"), pool ? percent(headroom, pool) : "–");
  set($("headroom-note"), pool ? `${bytes(headroom)} of ${bytes(pool)}` : "");
  // Each engine says how fast one of its sequences is.
  set($("tokens"), rate(sum(reporting.map((engine) => engine.requests_running * engine.decode_tokens_per_second))));
}

function showEngine(view, engine) {
  set(view.name, engine.id);
  set(view.pool, engine.route === engine.pool ? engine.pool : `${engine.pool} · ${engine.route}`);
  set(view.state, engine.state);
  view.state.className = `pill ${{ ready: "accept", draining: "shrink", loading: "shrink", connecting: "shrink" }[engine.state] || "reject"}`;
  set(view.trouble, engine.trouble);
  view.pressure.hidden = !engine.pressure_level;
  view.pressure.className = "pill shrink";
  set(view.pressure, `pressure ${engine.pressure_level}`);
  if (!engine.kv_pool_bytes) return;
  const shares = parts(engine);
  for (const [part, segment] of Object.entries(view.segments)) segment.style.width = `${100 * shares[part] / engine.kv_pool_bytes}%`;
  view.bar.setAttribute("aria-label", Object.entries(shares).map(([part, size]) => `${part} ${bytes(size)}`).join(", "));
  view.free.replaceChildren(make("b", "", bytes(engine.headroom_bytes)), ` headroom of ${bytes(engine.kv_pool_bytes)}`);
  const restarts = (engine.worker_restarts || 0) + engine.reports.restarts;
  const details = [
    ["used", bytes(shares.used)], ["committed", bytes(shares.committed)], ["reclaimable", bytes(shares.reclaimable)],
    ["running", engine.requests_running], ["waiting", engine.requests_waiting],
    ["tokens/s", rate(engine.requests_running * engine.decode_tokens_per_second)],
    ["restarts", restarts],
  ];
  view.details.replaceChildren(...details.map(([name, value]) => make("span", "", `${name} `, make("b", "", `${value}`))));
}

// Decisions -------------------------------------------------------------------------------------

let skipped = 0;
let paused = false;
let held = [];
const seen = new Set();

function onDecisions({ records, skipped: more }) {
  skipped += more;
  set($("skipped"), skipped ? `${skipped} not shown: more came than a page can follow` : "");
  const fresh = records.filter((record) => !seen.has(`${record.request_id} ${record.arrived}`));
  for (const record of fresh) {
    seen.add(`${record.request_id} ${record.arrived}`);
    countOverload(record);
    undecided.get(record.request_id)?.(headersOf(record));
    undecided.delete(record.request_id);
  }
  if (seen.size > 5000) seen.clear();
  held = [...held, ...fresh].slice(-KEPT_ROWS);
  if (!paused) showDecisions();
}

function headersOf(record) {
  return new Map([
    ["x-ullage-action", record.action], ["x-ullage-route", record.route], ["x-ullage-engine", record.engine],
    ["x-ullage-predicted-kv-bytes", record.predicted_bytes], ["x-ullage-degraded", record.degraded.join(", ")],
    ["x-ullage-trail", record.trail.join(", ")],
  ]);
}

function showDecisions() {
  const rows = held.map(row).reverse();
  held = [];
  $("decisions").prepend(...rows);
  while ($("decisions").children.length > KEPT_ROWS) $("decisions").lastChild.remove();
  $("no-decisions").hidden = $("decisions").children.length > 0;
}

function cell(classes, ...children) {
  return make("td", classes, ...children.filter(Boolean));
}

/** Small text that is below other text of a cell. */
function note(...words) {
  const text = words.filter(Boolean).join(" · ");
  return text && make("small", "", text);
}

/** The time of a request; a click on it shows below its row what happened when. */
function timeline(record) {
  const text = new Date(1000 * record.arrived).toLocaleTimeString([], { hour12: false });
  const button = make("button", "more", text);
  button.type = "button";
  button.title = "Shows what happened when";
  button.setAttribute("aria-expanded", "false");
  button.addEventListener("click", () => {
    const tr = button.closest("tr");
    const isOpen = button.getAttribute("aria-expanded") === "true";
    button.setAttribute("aria-expanded", `${!isOpen}`);
    if (isOpen) { tr.nextElementSibling.remove(); return; }
    const moments = [...record.timeline, { event: record.status === 200 ? "finished" : "ended", after_s: record.duration_s, reason: record.finish || record.error }];
    const items = moments.map((moment) => {
      const after = moment.after_s < 1 ? `${(1000 * moment.after_s).toFixed(1)} ms` : `${moment.after_s.toFixed(2)} s`;
      const words = [moment.admission_action, moment.reason, moment.engine].filter(Boolean).join(" ");
      return make("li", "", make("b", "", moment.event), ` ${after}`, words ? make("small", "", words) : "");
    });
    const td = make("td", "", make("ol", "", ...items));
    td.colSpan = 6;
    tr.after(make("tr", `detail ${tr.classList.contains("refused") ? "refused" : ""} ${tr.classList.contains("changed") ? "changed" : ""}`, td));
  });
  return button;
}

function row(record) {
  const action = record.action || (record.status < 400 ? "" : "reject");
  const isRefused = record.action === "reject" || record.status >= 400 && record.status !== 499;
  const isChanged = record.degraded.length > 0 || ["shrink", "queue", "route4"].includes(record.action);
  const reason = (isRefused && record.error) || record.reason || record.error;
  const trail = record.trail.length > 1 ? record.trail.map((step) => step.replace(`=${reason}`, "")).join(" → ") : "";
  const available = record.available_bytes;
  const [needs, tokens] = [bytes(record.predicted_bytes), record.output_tokens];
  return make("tr", `new ${isRefused ? "refused" : ""} ${isChanged ? "changed" : ""}`,
    cell("time", timeline(record)),
    cell("action", make("span", `pill ${action}`, action || "–"),
      note(`${record.status}`, record.retry_after_s && `retry in ${record.retry_after_s} s`)),
    cell("why", make("code", "", reason), note(MEANINGS[reason], ...record.degraded, trail)),
    cell("kv", needs, note(available !== null && `${bytes(Math.max(0, available))} available`)),
    cell("times", record.ttft_s && `first token ${seconds(record.ttft_s)}`,
      note(record.queued_s && `queued ${seconds(record.queued_s)}`, tokens && `${tokens} tokens`)),
    cell("id", traceButton(record.request_id, record.request_id), note(record.engine || record.route)));
}

function traceButton(id, text) {
  const button = make("button", "trace", text);
  button.type = "button";
  button.title = `Copies: ullage trace ${id}`;
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(`ullage trace ${id}`);
      set(button, "copied");
    } catch (error) {
      set(button, `ullage trace ${id}`); // without leave to copy it can be marked by hand
    }
    setTimeout(() => set(button, text), 1500);
  });
  return button;
}

for (const button of document.querySelectorAll(".choice button")) {
  button.addEventListener("click", () => {
    $("decisions").dataset.shown = button.dataset.show;
    for (const each of document.querySelectorAll(".choice button")) each.setAttribute("aria-pressed", `${each === button}`);
  });
}

$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", `${paused}`);
  set($("pause"), paused ? "Go on" : "Pause");
  if (!paused) showDecisions();
});

// Chat ------------------------------------------------------------------------------------------

let messages = [];

function say(role, text) {
  const said = make("div", `said ${role}`, make("div", "text", text));
  $("chat").querySelector(".hint")?.remove();
  $("chat").append(said);
  $("chat").scrollTop = $("chat").scrollHeight;
  return said;
}

/** Calls for records of answers whose headers left before anything was decided, by request. */
const undecided = new Map();

/** What was decided about an answer, of its headers, or of its record in the form of headers. */
function decision(headers) {
  const header = (name) => headers.get(name) || "";
  const action = header("x-ullage-action");
  const needs = header("x-ullage-predicted-kv-bytes");
  const words = [
    header("x-ullage-engine") || header("x-ullage-route"),
    needs && `needs ${bytes(Number(needs))}`,
    header("x-ullage-degraded"),
  ];
  const items = words.filter(Boolean).map((word) => make("span", "", word));
  if (action) items.unshift(make("span", `pill ${action}`, action));
  const steps = header("x-ullage-trail").split(", ");
  const reason = steps.at(-1).split("=")[1];
  if (reason) items.push(make("span", "", make("code", "", reason), MEANINGS[reason] ? ` ${MEANINGS[reason]}` : ""));
  if (steps.length > 1) items.push(make("span", "", steps.join(" → ")));
  const route = header("x-ullage-route");
  if (route && header("x-ullage-engine")) items.splice(1, 0, make("span", "chip", route));
  return items;
}

async function ask(text) {
  messages.push({ role: "user", content: text });
  say("user", text);
  const said = say("answer", ""), content = said.firstChild;
  const began = performance.now();
  let firstAt = null, tokens = 0, refusal = null;
  const body = { messages, max_tokens: Number($("max-tokens").value) || 128, stream: true, stream_options: { include_usage: true } };
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST", headers: authorized({ "content-type": "application/json" }), body: JSON.stringify(body),
    });
    const id = response.headers.get("x-request-id");
    const meta = make("div", "meta", ...decision(response.headers));
    said.append(meta);
    // A stream that waits long begins with comments that keep the connection, and says no more.
    if (response.ok && !response.headers.has("x-ullage-action")) undecided.set(id, (headers) => meta.prepend(...decision(headers)));
    if (response.ok) {
      await eachEvent(response, (name, data) => {
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) refusal = { status: "", retry: chunk.error.retry_after, ...chunk.error };
        const delta = chunk.choices?.[0]?.delta?.content;
        if (delta) {
          firstAt ??= performance.now();
          const isAtEnd = $("chat").scrollHeight - $("chat").scrollTop - $("chat").clientHeight < 60;
          content.append(delta);
          if (isAtEnd) $("chat").scrollTop = $("chat").scrollHeight;
        }
        tokens = chunk.usage?.completion_tokens ?? tokens;
      });
      messages.push({ role: "assistant", content: content.textContent });
    } else {
      const { error } = await response.json();
      refusal = { status: response.status, retry: response.headers.get("retry-after"), ...error };
      if (response.status === 401) $("login").hidden = false;
    }
    if (firstAt) meta.append(make("span", "", `first token ${seconds((firstAt - began) / 1000)}`));
    if (tokens > 1) meta.append(make("span", "", `${rate(1000 * (tokens - 1) / (performance.now() - firstAt))} tokens/s`));
    if (refusal) showRefusal(said, content, meta, refusal);
    if (id) meta.append(traceButton(id, `ullage trace ${id}`));
  } catch (error) {
    said.classList.add("refused");
    content.append(" The router does not answer.");
    messages.pop();
  }
  $("chat").scrollTop = $("chat").scrollHeight;
}

function showRefusal(said, content, meta, refusal) {
  said.classList.add("refused");
  content.append(content.textContent ? "\n" : "", refusal.message);
  meta.prepend(make("span", "pill reject", `${refusal.status} ${refusal.code}`));
  if (refusal.retry) meta.append(make("span", "", `Retry-After ${refusal.retry} s`));
  if (messages.at(-1).role === "user") messages.pop(); // it was not answered
}

$("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = $("text").value.trim();
  if (!text || $("send").disabled) return;
  $("text").value = "";
  $("send").disabled = true;
  await ask(text);
  $("send").disabled = false;
});

$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});

$("clear").addEventListener("click", () => {
  messages = [];
  $("chat").replaceChildren();
});

// Overload --------------------------------------------------------------------------------------

let overload = null;
/** Records of requests that were sent in an overload: the first may come before its answer does. */
let sent = [];

$("overload").addEventListener("submit", async (event) => {
  event.preventDefault();
  const requests = Number($("count").value) || 60;
  const response = await fetch("/console/overload", {
    method: "POST", headers: authorized({ "content-type": "application/json" }), body: JSON.stringify({ requests }),
  });
  const answer = await response.json();
  $("tally").hidden = false;
  if (!response.ok) { set($("tally-text"), answer.error.message); return; }
  overload = { ...answer, served: 0, refused: 0, failed: 0, reasons: {}, retry: [] };
  sent.forEach(tally);
  showTally();
});

function countOverload(record) {
  if (!record.request_id.startsWith("overload-")) return;
  sent = [...sent, record].slice(-500);
  if (overload) tally(record);
}

function tally(record) {
  if (!record.request_id.startsWith(`${overload.prefix}-`)) return;
  if (record.status === 200) overload.served += 1;
  else if (record.status === 429) {
    overload.refused += 1;
    overload.reasons[record.error] = (overload.reasons[record.error] || 0) + 1;
    if (record.retry_after_s) overload.retry.push(record.retry_after_s);
  } else overload.failed += 1;
  showTally();
}

function showTally() {
  const { requests, served, refused, failed, reasons, retry } = overload;
  const [acceptBar, rejectBar, failedBar] = $("tally").querySelectorAll("i");
  acceptBar.style.width = `${100 * served / requests}%`;
  rejectBar.style.width = `${100 * refused / requests}%`;
  failedBar.style.width = `${100 * failed / requests}%`;
  const open = requests - served - refused - failed;
  const why = Object.entries(reasons).map(([reason, count]) => `${count} ${reason}`).join(", ");
  const words = [`${served} served`, `${refused} refused with 429${why ? ` (${why})` : ""}`];
  const [least, most] = [Math.min(...retry), Math.max(...retry)];
  if (retry.length) words.push(`retry in ${least === most ? least : `${least}–${most}`} s`);
  if (failed) words.push(`${failed} failed`);
  if (open) words.push(`${open} under way`);
  set($("tally-text"), words.join(" · "));
}

follow();
