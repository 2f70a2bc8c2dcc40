"use strict";

const POLL_MS = 1000;
const WORST = -8; // a logprob that is shown as red as any below

// State, and the engine's numbers.

async function showState() {
  const badge = byId("state");
  let state = "unreachable";
  try {
    state = (await (await fetch("health")).json()).status;
  } catch {}
  badge.dataset.state = state;
  badge.textContent = state === "ok" ? "ready" : state;
  byId("run").disabled = state !== "ok";
  return state;
}

async function refresh() {
  const state = await showState();
  if (state === "ok") {
    try {
      show(await (await call("server_info")).json());
    } catch (error) {
      if (error.status !== 401) byId("shapes").textContent = error.message;
    }
  }
  if (byId("key-form").hidden) setTimeout(refresh, document.hidden ? 5 * POLL_MS : POLL_MS);
}

function show(info) {
  byId("model").textContent = `${info.served_model_names[0]} · ${info.architecture}`;
  byId("shapes").textContent =
    `path ${info.ladder.path}, ${info.slots} request slots, context ${info.max_contexts.join(", ")}; ` +
    `${info.executables.length} executables; nothing compiles after start-up`;
  const counters = info.counters;
  showCounters(info, counters);
  showLadder(info.ladder, counters);
  const reasons = Object.entries(counters.fallbacks);
  byId("fallbacks").replaceChildren(
    ...(reasons.length ? reasons : [["no fallbacks", ""]]).map(([reason, count]) =>
      element("li", `${reason.replaceAll("_", " ")} ${count}`)));
}

let last = null;

function showCounters(info, counters) {
  const now = performance.now();
  const rate = last && (counters.real_tokens - last.tokens) / ((now - last.at) / 1000);
  last = { tokens: counters.real_tokens, at: now };
  const pages = counters.kv_pages, recent = counters.recent_pages;
  const computed = counters.real_tokens + counters.padding_tokens;
  const rows = [
    ["requests running", counters.num_running],
    ["requests waiting", counters.num_waiting],
    ["tokens a second", rate === null ? "–" : Math.max(rate, 0).toFixed(0)],
    ["tokens computed", counters.real_tokens],
    ["tokens from the prefix cache", counters.cached_tokens],
    ["padding", `${(100 * counters.padding_tokens / Math.max(computed, 1)).toFixed(1)} %`],
    ["KV pages in use", `${pages.total - pages.free} of ${pages.total}`],
    ["pages that keep a prefix", pages.cached],
    ...(recent
      ? [["pages of recent tokens in use", `${recent.total - recent.free} of ${recent.total}`]] : []),
    ["preemptions", counters.preemptions],
    ["corrupted requests", counters.corrupted_requests, counters.corrupted_requests > 0],
    ["compilations after ready", counters.compilations_after_ready,
      counters.compilations_after_ready > 0],
    ["engine restarts", info.num_restarts],
  ];
  byId("counters").replaceChildren(...rows.flatMap(([name, value, isBad]) => [
    element("dt", name),
    element("dd", value.toLocaleString("en"), isBad ? { class: "bad" } : {}),
  ]));
}

// The ladder: a bar for each bucket, as high as the root of its passes; padding is its lower part.

const SVG = "http://www.w3.org/2000/svg";

function drawn(name, attributes, text) {
  const found = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
  if (text !== undefined) found.textContent = text;
  return found;
}

function rungs(ladder, counters) {
  const found = new Map(ladder.buckets.map((bucket) =>
    [`${ladder.path} ${bucket}`, { bucket, passes: 0, padding: 0, isFallback: false }]));
  for (const [name, passes] of Object.entries(counters.executables)) {
    const [path, shape] = name.split(" ");
    if (path === "decode") continue;
    const bucket = Number(shape.split("x")[0]);
    const key = `${path} ${bucket}`;
    if (!found.has(key)) found.set(key, { bucket, passes: 0, padding: 0, isFallback: path === "eager" });
    found.get(key).passes += passes;
    found.get(key).padding += counters.padding[name] ?? 0;
  }
  return [...found.values()];
}

function showLadder(ladder, counters) {
  const svg = byId("ladder");
  const all = rungs(ladder, counters);
  const wide = svg.clientWidth || 600, high = svg.clientHeight || 200;
  const foot = 20, head = 30, step = wide / all.length;
  svg.setAttribute("viewBox", `0 0 ${wide} ${high}`);
  const most = Math.sqrt(Math.max(...all.map((rung) => rung.passes), 1));
  const parts = [drawn("line", { class: "base", x1: 0, x2: wide, y1: high - foot, y2: high - foot })];
  all.forEach((rung, index) => {
    const tall = (high - foot - head) * Math.sqrt(rung.passes) / most;
    const share = rung.passes ? rung.padding / (rung.bucket * rung.passes) : 0;
    const place = { x: index * step + step * 0.15, width: step * 0.7 };
    const middle = index * step + step / 2;
    const top = high - foot - tall;
    const full = drawn("rect",
      { ...place, y: top, height: tall, class: rung.isFallback ? "fallback" : "real" });
    const tip = `${rung.isFallback ? "fallback, " : ""}${rung.bucket} tokens: ${rung.passes} passes, ` +
      `${(100 * share).toFixed(1)} % padding`;
    full.append(drawn("title", {}, tip));
    parts.push(full, drawn("rect",
      { ...place, y: high - foot - tall * share, height: tall * share, class: "padding" }));
    parts.push(drawn("text", { x: middle, y: high - 5 }, rung.bucket));
    if (rung.passes) parts.push(drawn("text", { x: middle, y: top - 5 }, rung.passes));
  });
  svg.replaceChildren(...parts);
}

// The prompt, and what came of it.

async function run(event) {
  event.preventDefault();
  const error = byId("error");
  error.hidden = true;
  byId("run").disabled = true;
  byId("timing").textContent = "running…";
  const began = performance.now();
  try {
    const reply = await (await call("v1/completions", {
      prompt: byId("prompt").value,
      max_tokens: Number(byId("max-tokens").value),
      temperature: Number(byId("temperature").value),
      echo: true,
      logprobs: 5,
    })).json();
    byId("timing").textContent = `${(performance.now() - began).toFixed(0)} ms, ` +
      `${reply.usage.prompt_tokens} + ${reply.usage.completion_tokens} tokens`;
    showTokens(reply.choices[0].logprobs, reply.usage.prompt_tokens);
  } catch (failure) {
    byId("timing").textContent = "";
    error.textContent = failure.message;
    error.hidden = false;
  }
  byId("run").disabled = false;
}

function showTokens(logprobs, numPrompt) {
  byId("result").replaceChildren(...logprobs.tokens.map((token, index) => {
    const logprob = logprobs.token_logprobs[index];
    const span = element("span", token, { class: "token" });
    if (index >= numPrompt) span.classList.add("generated");
    if (logprob === null) {
      span.classList.add("unscored");
      span.title = "the first token: nothing stands before it";
    } else {
      const hue = 120 * (1 - Math.max(logprob, WORST) / WORST);
      span.style.backgroundColor = `hsl(${hue.toFixed(0)} 75% 75%)`;
      span.dataset.logprob = logprob;
      const others = Object.entries(logprobs.top_logprobs[index] ?? {}).sort((a, b) => b[1] - a[1]);
      span.title = [`logprob ${logprob.toFixed(3)} (${(100 * Math.exp(logprob)).toFixed(1)} %)`,
        ...others.map(([name, value]) => `${value.toFixed(3)}  ${JSON.stringify(name)}`)].join("\n");
    }
    return span;
  }));
  byId("legend").hidden = false;
}

byId("prompt-form").addEventListener("submit", run);
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("prompt-form").requestSubmit();
});
onKey(refresh);
refresh();
