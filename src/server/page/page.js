"use strict";
// A conversation with the model that this server has. Nothing is loaded from elsewhere, and what a model writes becomes text
// nodes, never markup.

const $ = id => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];
let model = null;      // as /v1/models tells of it
let messages = [];     // what was said: { role, content }
let running = null;    // aborts the answer that is being written

// --- storage that may not be there (private windows)

function keep(store, name, value) {
  try { value ? store.setItem(name, value) : store.removeItem(name); } catch { /* not kept */ }
}

function kept(store, name) {
  try { return store.getItem(name) || ""; } catch { return ""; }
}

// --- Markdown: blocks, then what is within a line

function element(name, text, ...children) {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  made.append(...children);
  return made;
}

const INLINE = /(`+)([\s\S]*?[^`])\1(?!`)|\*\*(?=\S)([\s\S]*?\S)\*\*|\*(?=\S)([^*]*?\S)\*|~~(?=\S)([\s\S]*?\S)~~|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/;

function inline(text) {
  const parts = [];
  for (;;) {
    const found = INLINE.exec(text);
    if (!found) break;
    if (found.index) parts.push(text.slice(0, found.index));
    const [whole, , code, strong, em, struck, label, link] = found;
    if (code !== undefined) parts.push(element("code", code.trim()));
    else if (strong !== undefined) parts.push(element("strong", "", ...inline(strong)));
    else if (em !== undefined) parts.push(element("em", "", ...inline(em)));
    else if (struck !== undefined) parts.push(element("s", "", ...inline(struck)));
    else {
      const a = element("a", "", ...inline(label));
      a.href = link;
      a.rel = "noopener noreferrer";
      a.target = "_blank";
      parts.push(a);
    }
    text = text.slice(found.index + whole.length);
  }
  if (text) parts.push(text);
  return parts;
}

function codeBlock(code, language) {
  const copy = element("button", "Copy");
  copy.type = "button";
  copy.setAttribute("aria-label", language ? `Copy the ${language} code` : "Copy the code");
  copy.onclick = async () => {
    try {
      await navigator.clipboard.writeText(code);
      copy.textContent = "Copied";
    } catch {
      copy.textContent = "Not allowed";
    }
    setTimeout(() => { copy.textContent = "Copy"; }, 1500);
  };
  const pre = element("pre", "", element("code", code));
  pre.tabIndex = 0;
  const block = element("div", "", pre, copy);
  block.className = "block";
  return block;
}

const ITEM = /^(\s*)(?:[-*+]|(\d+)[.)])\s+(.*)$/;

// The items from a line on that are as deep as its own, deeper ones within them.
function list(lines, at) {
  const [, indent, number] = ITEM.exec(lines[at]);
  const made = element(number === undefined ? "ul" : "ol");
  if (number !== undefined) made.start = Number(number);
  let item = null;
  while (at < lines.length) {
    const found = ITEM.exec(lines[at]);
    if (found && found[1].length > indent.length && item) {
      const [inner, next] = list(lines, at);
      item.append(inner);
      at = next;
    } else if (found && found[1].length === indent.length) {
      item = element("li", "", ...inline(found[3]));
      made.append(item);
      at += 1;
    } else if (!found && item && /^\s+\S/.test(lines[at])) {
      item.append(" ", ...inline(lines[at].trim()));
      at += 1;
    } else break;
  }
  return [made, at];
}

const cells = line => line.trim().replace(/^\||\|$/g, "").split("|").map(cell => cell.trim());

function markdown(text) {
  const lines = text.split("\n");
  const blocks = [];
  let paragraph = [];
  const end = () => {
    if (paragraph.length) blocks.push(element("p", "", ...inline(paragraph.join("\n"))));
    paragraph = [];
  };
  for (let at = 0; at < lines.length;) {
    const line = lines[at];
    const fence = /^\s*(`{3,}|~{3,})\s*([\w+#.-]*)/.exec(line);
    const heading = /^(#{1,6})\s+(.*?)\s*#*$/.exec(line);
    if (fence) {
      end();
      const code = [];
      for (at += 1; at < lines.length && !lines[at].trim().startsWith(fence[1]); at += 1) code.push(lines[at]);
      at += 1;
      blocks.push(codeBlock(code.join("\n"), fence[2]));
    } else if (heading) {
      end();
      blocks.push(element(["h3", "h4", "h5"][Math.min(heading[1].length, 3) - 1], "", ...inline(heading[2])));
      at += 1;
    } else if (/^\s*([-*_])(\s*\1){2,}\s*$/.test(line)) {
      end();
      blocks.push(element("hr"));
      at += 1;
    } else if (/^\s*>/.test(line)) {
      end();
      const quoted = [];
      for (; at < lines.length && /^\s*>/.test(lines[at]); at += 1) quoted.push(lines[at].replace(/^\s*> ?/, ""));
      blocks.push(element("blockquote", "", ...markdown(quoted.join("\n"))));
    } else if (ITEM.test(line)) {
      end();
      const [made, next] = list(lines, at);
      blocks.push(made);
      at = next;
    } else if (line.includes("|") && /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)+\|?\s*$/.test(lines[at + 1] || "")) {
      end();
      const row = (name, line) => element("tr", "", ...cells(line).map(cell => element(name, "", ...inline(cell))));
      const body = element("tbody");
      const table = element("table", "", element("thead", "", row("th", line)), body);
      for (at += 2; at < lines.length && lines[at].includes("|"); at += 1) body.append(row("td", lines[at]));
      blocks.push(table);
    } else {
      if (line.trim()) paragraph.push(line);
      else end();
      at += 1;
    }
  }
  end();
  return blocks;
}

// --- the conversation on the page

const chats = () => model !== null && model.paths.includes("/v1/chat/completions");
const NAMES = { user: "You", assistant: "Answer", system: "System" };

function show(message) {
  $("empty").hidden = true;
  const text = element("div");
  text.className = "text";
  const under = element("div");
  under.className = "under";
  const article = element("article", "", element("h2", NAMES[message.role]), text, under);
  article.className = `said ${message.role}`;
  $("log").append(article);
  const shown = { message, article, text, under };
  draw(shown);
  return shown;
}

function draw({ message, text }) {
  if (message.role === "assistant" && chats()) text.replaceChildren(...markdown(message.content));
  else {
    text.textContent = message.content;
    text.classList.add("plain");
  }
}

function atEnd() {
  const log = $("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < 60;
}

function toEnd() {
  $("log").scrollTop = $("log").scrollHeight;
}

function fail(message) {
  $("error").textContent = message;
  $("error").hidden = !message;
}

function busy(is) {
  $("send").hidden = is;
  $("stop").hidden = !is;
  document.querySelectorAll(".regenerate").forEach(button => { button.disabled = is; });
}

// --- requests

function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

function settings() {
  const set = {};
  for (const name of NUMBERS) {
    const value = $(name).value.trim();
    if (value !== "") set[name] = Number(value);
  }
  return set;
}

// Server-sent events, each as its data.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const whole = held.split("\n\n");
    held = whole.pop();
    for (const event of whole) if (event.startsWith("data: ")) yield event.slice(6);
  }
}

async function answer() {
  fail("");
  const chat = chats();
  const system = $("system").value.trim();
  const said = chat && system ? [{ role: "system", content: system }, ...messages] : messages.slice();
  const body = { model: model.id, stream: true, stream_options: { include_usage: true }, ...settings() };
  if (chat) body.messages = said;
  else {
    body.prompt = messages.map(message => message.content).join("");
    body.max_tokens ??= Math.min(200, Math.floor(model.context_length / 2));
  }
  const message = { role: "assistant", content: "" };
  const shown = show(message);
  shown.text.classList.add("cursor");
  toEnd();
  running = new AbortController();
  busy(true);
  const begun = performance.now();
  let first = 0, tokens = 0, drawing = false, complete = false;
  try {
    const path = chat ? "/v1/chat/completions" : "/v1/completions";
    const response = await fetch(path, {
      method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal,
    });
    if (response.status === 401) askForKey();
    if (!response.ok) throw new Error(await reason(response));
    for await (const data of events(response)) {
      if (data === "[DONE]") { complete = true; break; }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) tokens = chunk.usage.completion_tokens;
      const piece = chunk.choices[0] && (chat ? chunk.choices[0].delta.content : chunk.choices[0].text);
      if (!piece) continue;
      first ||= performance.now();
      message.content += piece;
      if (!drawing) {
        drawing = true;
        requestAnimationFrame(() => {
          drawing = false;
          const follow = atEnd();
          draw(shown);
          if (follow) toEnd();
        });
      }
    }
    if (!complete) throw new Error("the connection broke off");
  } catch (error) {
    if (error.name !== "AbortError") fail(error.message);
  }
  // What came nearly all at once is measured from the question on: how long it took to arrive says nothing.
  const now = performance.now(), seconds = (now - (now - first < 100 ? begun : first)) / 1000, speed = tokens / seconds;
  running = null;
  busy(false);
  shown.text.classList.remove("cursor");
  draw(shown);
  if (message.content) messages.push(message);
  else shown.article.remove();
  const follow = atEnd();
  if (message.content) {
    const told = complete && tokens > 1 ? `${tokens} tokens, ${speed.toFixed(speed < 100 ? 1 : 0)} tokens/s, the first after ${(first - begun).toFixed(0)} ms` : "stopped";
    document.querySelectorAll(".regenerate").forEach(button => button.remove());
    const again = element("button", "Regenerate");
    again.type = "button";
    again.className = "regenerate";
    again.onclick = () => {
      if (running) return;
      messages = messages.slice(0, messages.indexOf(message));
      shown.article.remove();
      answer();
    };
    shown.under.append(element("span", told), again);
  }
  if (follow) toEnd();
}

function say() {
  const content = chats() ? $("prompt").value.trim() : $("prompt").value;
  if (running || model === null || (!content.trim() && chats())) return;
  if (content) {
    const message = { role: "user", content };
    messages.push(message);
    show(message);
  }
  if (!messages.length) return;
  $("prompt").value = "";
  fit();
  answer();
}

function stop() {
  if (running) running.abort();
  $("prompt").focus();
}

function fresh() {
  stop();
  messages = [];
  document.querySelectorAll(".said").forEach(said => said.remove());
  $("empty").hidden = false;
  fail("");
  $("prompt").focus();
}

// --- settings

function fit() {
  const box = $("prompt");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
}

function toggleSettings(open) {
  $("settings").hidden = !open;
  $("show-settings").setAttribute("aria-expanded", String(open));
  $("show-settings").textContent = open ? "Close settings" : "Settings";
}

function askForKey() {
  $("key-label").hidden = false;
  toggleSettings(true);
  $("key").focus();
}

async function connect() {
  try {
    const health = await (await fetch("/health")).json();
    if (health.status !== "ready") {
      $("state").textContent = health.status;
      setTimeout(connect, 1000);
      return;
    }
    const response = await fetch("/v1/models", { headers: headers() });
    if (response.status === 401) {
      $("state").textContent = "an API key is needed: see the settings";
      askForKey();
      return;
    }
    model = (await response.json()).data[0];
    $("model").textContent = model.id;
    document.title = `${model.id} - Fireclay`;
    const writes = model.paths.includes("/v1/completions");
    $("state").textContent = writes ? "ready" : "an encoder: it answers programs, at /v1";
    $("send").disabled = !writes;
    $("system-label").hidden = !chats();
    if (!chats() && writes) {
      $("prompt-label").textContent = "Text to go on from";
      $("empty").textContent = "This model goes on from a text; it was not made to converse.";
    }
  } catch {
    $("state").textContent = "the server does not answer";
    setTimeout(connect, 2000);
  }
}

function theme(value) {
  if (value) document.documentElement.dataset.theme = value;
  else delete document.documentElement.dataset.theme;
}

$("say").onsubmit = event => { event.preventDefault(); say(); };
$("prompt").oninput = fit;
$("prompt").onkeydown = event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); say(); }
};
document.onkeydown = event => {
  if (event.key !== "Escape") return;
  if (running) stop();
  else if (!$("settings").hidden) { toggleSettings(false); $("show-settings").focus(); }
};
$("stop").onclick = stop;
$("new").onclick = fresh;
$("show-settings").onclick = () => toggleSettings($("settings").hidden);
$("key").onchange = () => { keep(sessionStorage, "key", $("key").value.trim()); connect(); };
$("system").onchange = () => keep(localStorage, "system", $("system").value);
$("theme").onchange = () => { keep(localStorage, "theme", $("theme").value); theme($("theme").value); };
$("key").value = kept(sessionStorage, "key");
$("system").value = kept(localStorage, "system");
$("theme").value = kept(localStorage, "theme");
theme($("theme").value);
$("prompt").focus();
connect();
