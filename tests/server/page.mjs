// The page in a browser: `node page.mjs CHROMIUM CHAT_URL STORIES_URL KEYED_URL KEY [SCREENSHOTS]`.
// Needs playwright-core.

import assert from "node:assert/strict";
import { mkdir } from "node:fs/promises";
import { chromium } from "playwright-core";

const [executablePath, chat, stories, keyed, key, pictures] = process.argv.slice(2);
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });
if (pictures) await mkdir(pictures, { recursive: true });

async function open(url, settings = {}) {
  const context = await browser.newContext({ viewport: { width: 1100, height: 760 }, ...settings });
  const page = await context.newPage();
  const faults = [];
  page.on("pageerror", error => faults.push(String(error)));
  page.on("console", message => { if (message.type() === "error" && !/status of 4/.test(message.text())) faults.push(message.text()); });
  page.on("request", request => { if (!request.url().startsWith(url)) faults.push(`asked elsewhere: ${request.url()}`); });
  await page.goto(url);
  return { page, faults, context };
}

const picture = (page, name) => pictures && page.screenshot({ path: `${pictures}/${name}.png` });
const ready = page => page.waitForFunction(() => document.querySelector("#state").textContent === "ready");
const done = page => page.waitForFunction(() => document.querySelector("#stop").hidden, null, { timeout: 60000 });
const count = (page, role) => page.locator(`.said.${role}`).count();
const answers = page => page.locator(".said.assistant .text");
const focused = page => page.evaluate(() => {
  const { id, className, tagName } = document.activeElement;
  return id || className || tagName;
});
const set = (page, name, value) => page.$eval(`#${name}`, (box, value) => { box.value = value; }, String(value));

// Takes the model's place: `piece` writes to the answer that the page waits for, and `end` ends it.
const standIn = page => page.evaluate(() => {
  const real = window.fetch;
  window.fetch = (url, options) => {
    if (!/completions$/.test(url)) return real(url, options);
    window.asked = JSON.parse(options.body);
    return Promise.resolve(new Response(new ReadableStream({
      start(stream) {
        const send = text => stream.enqueue(new TextEncoder().encode(`data: ${text}\n\n`));
        window.piece = content => send(JSON.stringify({ choices: [{ delta: { content } }] }));
        window.end = () => { send("[DONE]"); stream.close(); };
        options.signal.onabort = () => stream.error(options.signal.reason);
      },
    })));
  };
});
async function say(page, text) {
  await page.fill("#prompt", text);
  await page.press("#prompt", "Enter");
}
// A message and its answer by the stand-in.
async function exchange(page, text, answer) {
  await say(page, text);
  await page.evaluate(answer => { window.piece(answer); window.end(); }, answer);
  await done(page);
}
const refuse = (page, status, error) => page.route(/completions$/, route => route.fulfill({
  status, contentType: "application/json", body: JSON.stringify({ error }),
}));

// What a model may write becomes what Markdown says, and never markup of its own.
const MARKDOWN = [
  "# Firing", "", "A **slow** rise to `900` *degrees*, see [the kiln](https://example.org/kiln).", "",
  "1. dry", "   - one day", "2. fire", "", "| cone | heat |", "|---|---|", "| 06 | 999 |", "",
  "```python", "print('<b>hot</b>')", "```", "", "> wait", "", "<img src=x onerror=\"window.hurt = true\"> ~~no~~ 2 * 3 * 4",
].join("\n");

async function conversation() {
  const { page, faults, context } = await open(chat);
  await ready(page);
  assert.equal(await page.title(), "chat - Fireclay");
  await page.click("#show-settings");
  await page.fill("#system", "Be brief.");
  await page.dispatchEvent("#system", "change");
  await page.fill("#max_tokens", "30");
  await page.fill("#seed", "5");
  await page.keyboard.press("Escape");
  assert.equal(await page.isVisible("#settings"), false, "Escape closes the settings");

  // By the keyboard alone.
  await page.focus("#prompt");
  await page.keyboard.type("Hello");
  await page.keyboard.press("Shift+Enter");
  await page.keyboard.type("potter");
  await page.keyboard.press("Enter");
  await done(page);
  assert.equal(await page.locator(".said.user .text").innerText(), "Hello\npotter");
  const first = await page.locator(".said.assistant .text").innerText();
  assert.ok(first.length > 3, first);
  assert.match(await page.locator(".said.assistant .under span").innerText(), /^\d+ tokens, [\d.]+ tokens\/s/);
  await page.click(".regenerate");
  await done(page);
  assert.equal(await count(page, "assistant"), 1, "an answer takes the place of the one before");
  assert.equal(await page.locator(".said.assistant .text").innerText(), first, "the same seed writes the same");

  // An answer that goes on is stopped, and stays as far as it came. Here one that never ends takes
  // the model's place.
  await standIn(page);
  await page.fill("#prompt", "How long?");
  await page.click("#send");
  await page.evaluate(() => window.piece("On and on"));
  await page.waitForFunction(() => document.querySelectorAll(".said.assistant .text")[1]?.textContent === "On and on");
  assert.equal(await page.isVisible("#stop"), true);
  await page.keyboard.press("Escape");
  await done(page);
  assert.equal(await page.locator(".said.assistant .under").nth(1).innerText(), "stopped\nRegenerate");
  const asked = await page.evaluate(() => window.asked);
  assert.deepEqual(asked.messages.map(message => message.role), ["system", "user", "assistant", "user"]);
  assert.equal(asked.max_tokens, 30);

  await page.reload();
  await ready(page);
  await page.click("#new");
  assert.equal(await count(page, "user") + await count(page, "assistant"), 0);

  await page.route("**/v1/chat/completions", route => {
    const event = value => `data: ${JSON.stringify(value)}\n\n`;
    const pieces = MARKDOWN.match(/[\s\S]{1,7}/g).map(content => event({ choices: [{ delta: { content } }] }));
    const usage = event({ choices: [], usage: { completion_tokens: 120 } });
    route.fulfill({ contentType: "text/event-stream", body: `${pieces.join("")}${usage}data: [DONE]\n\n` });
  });
  await page.fill("#prompt", "How is a pot fired?");
  await page.keyboard.press("Enter");
  await page.waitForSelector(".regenerate");
  const text = page.locator(".said.assistant .text");
  assert.equal(await text.locator("h3").innerText(), "Firing");
  assert.equal(await text.locator("strong").innerText(), "slow");
  assert.equal(await text.locator("p > code").innerText(), "900");
  assert.equal(await text.locator("a").getAttribute("href"), "https://example.org/kiln");
  assert.equal(await text.locator("ol > li").count(), 2);
  assert.equal(await text.locator("ol ul > li").innerText(), "one day");
  assert.equal(await text.locator("td").nth(1).innerText(), "999");
  assert.equal(await text.locator("pre code").innerText(), "print('<b>hot</b>')");
  assert.equal(await text.locator("blockquote").innerText(), "wait");
  assert.equal(await text.locator("img").count(), 0);
  assert.match(await text.innerText(), /<img src=x onerror="window.hurt = true"> no 2 \* 3 \* 4/);
  assert.equal(await page.evaluate(() => window.hurt), undefined);
  await picture(page, "light");
  await page.emulateMedia({ colorScheme: "dark" });
  await picture(page, "dark");
  await page.emulateMedia({ colorScheme: "light" });
  await page.click("#show-settings");
  await page.selectOption("#theme", "dark");
  await picture(page, "settings");

  // What a screen reader is told: names of all that can be used, and contrast that can be read.
  const unnamed = await page.evaluate(() => [...document.querySelectorAll("button, input, textarea, select")]
    .filter(one => one.offsetParent !== null && !one.labels?.length && !one.textContent.trim() && !one.ariaLabel).map(one => one.outerHTML));
  assert.deepEqual(unnamed, []);
  for (const colours of ["light", "dark"]) {
    await page.selectOption("#theme", colours);
    const poor = await page.evaluate(() => {
      const light = colour => {
        const parts = colour.match(/[\d.]+/g).slice(0, 3).map(part => part / 255);
        const [r, g, b] = parts.map(part => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
      };
      const ground = one => {
        for (; one; one = one.parentElement) {
          const colour = getComputedStyle(one).backgroundColor;
          if (!/, 0\)$/.test(colour)) return colour;
        }
        return "rgb(255, 255, 255)";
      };
      const elements = "h1, h2, p, li, label, small, button, code, a, td, .under span, .bar span";
      return [...document.querySelectorAll(elements)].filter(one => {
        if (one.offsetParent === null) return false;
        const [a, b] = [light(getComputedStyle(one).color), light(ground(one))].sort((a, b) => b - a);
        return (a + 0.05) / (b + 0.05) < 4.5;
      }).map(one => `${one.tagName} ${one.id} ${one.textContent.slice(0, 20)}`);
    });
    assert.deepEqual(poor, [], `contrast, ${colours}`);
  }
  assert.deepEqual(faults, []);
  await context.close();
}

async function phone() {
  const { page, faults, context } = await open(chat, { viewport: { width: 360, height: 640 }, hasTouch: true, isMobile: true });
  await ready(page);
  await page.fill("#prompt", "A question from a phone, long enough for two lines of it");
  await page.click("#send");
  await done(page);
  const wide = await page.evaluate(() => document.documentElement.scrollWidth);
  assert.ok(wide <= 360, `${wide} pixels of 360`);
  await picture(page, "narrow");
  for (const panel of ["chats", "settings"]) {
    await page.click(`#show-${panel}`);
    await picture(page, `narrow-${panel}`);
    const right = await page.$$eval("button", all => Math.max(...all.map(one => one.getBoundingClientRect().right)));
    assert.ok(right <= 360, `a button ends at ${right} of 360 pixels`);
    await page.click(`#show-${panel}`);
  }
  assert.deepEqual(faults, []);
  await context.close();
}

async function completion() {
  const { page, faults, context } = await open(stories);
  await ready(page);
  // Greedy tokens: a sampled one may end a text at once.
  await page.click("#show-settings");
  await page.fill("#temperature", "0");
  await page.keyboard.press("Escape");
  await page.fill("#prompt", "There was once a");
  await page.keyboard.press("Enter");
  await done(page);
  const words = (await page.locator(".said.assistant .text").innerText()).trim().split(/\s+/);
  assert.ok(words.length > 20, words.join(" "));
  await picture(page, "stories");

  // The text goes on, and when the model has no room for all of it, for its end.
  for (let turn = 1; turn < 4; turn += 1) {
    await say(page, " She makes a small jug, and the old baker shared the clever one.");
    await done(page);
    assert.equal(await page.isVisible("#error"), false, await page.innerText("#error"));
    assert.equal(await count(page, "assistant"), turn + 1);
  }
  assert.match(await page.innerText(".cut"), /no longer sent: they do not fit in the model's [\d,]+ tokens\./);
  await picture(page, "stories-cut");
  // As many tokens as fit, though more are allowed.
  await set(page, "max_tokens", 100000);
  await say(page, " She");
  await done(page);
  assert.equal(await page.isVisible("#error"), false, await page.innerText("#error"));
  // There is no room next to a text that is too long by itself.
  await say(page, " She makes pots.".repeat(100));
  await done(page);
  assert.match(await page.innerText("#error"), /tokens/);
  assert.match(await page.inputValue("#prompt"), /^( She makes pots\.){100}$/);
  assert.equal(await count(page, "assistant"), 5);
  assert.deepEqual(faults, []);
  await context.close();
}

// The oldest messages of a conversation are left out when the model has no room for them.
async function longConversation() {
  const { page, faults, context } = await open(chat);
  await ready(page);
  await set(page, "max_tokens", 20);
  await page.fill("#prompt", "");
  const asked = [];
  page.on("request", request => { if (/completions$/.test(request.url())) asked.push(request.postDataJSON()); });
  for (let turn = 0; turn < 6; turn += 1) {
    await say(page, `${turn} `.repeat(120));
    await done(page);
    assert.equal(await page.isVisible("#error"), false, await page.innerText("#error"));
    assert.equal(await count(page, "assistant"), turn + 1);
  }
  const last = asked.at(-1).messages;
  assert.ok(last.length < 11 && last[0].role === "user" && last.at(-1).content.startsWith("5 5"), JSON.stringify(last));
  assert.equal(await page.locator(".cut").count(), 1);
  const sent = page.locator(".said").nth(12 - last.length - 1);
  assert.equal(await page.locator(".cut + .said").innerText(), await sent.innerText());
  await page.reload();
  await ready(page);
  assert.equal(await page.locator(".cut").count(), 1);
  assert.equal(await count(page, "user"), 6);
  assert.deepEqual(faults, []);
  await context.close();
}

// What is refused leaves the conversation, and what was typed returns.
async function refusals() {
  const { page, context } = await open(chat);
  await ready(page);
  await standIn(page);
  await exchange(page, "Hello", "Good morning.");
  await page.reload();
  await ready(page);

  for (const [status, message] of [[429, "too many requests are waiting"], [500, "the kiln broke"], [503, "still loading"]]) {
    await refuse(page, status, { message });
    await say(page, "Two\nlines");
    await page.waitForSelector("#error:not([hidden])");
    assert.equal(await page.innerText("#error"), message);
    assert.deepEqual([await count(page, "user"), await count(page, "assistant")], [1, 1]);
    assert.equal(await page.inputValue("#prompt"), "Two\nlines");
    assert.equal(await focused(page), "prompt");
    await page.unroute(/completions$/);
  }
  await page.route(/completions$/, route => route.abort());
  await page.click(".regenerate");
  await page.waitForSelector("#error:not([hidden])");
  assert.equal(await page.innerText("#error"), "the server does not respond");
  assert.equal(await answers(page).innerText(), "Good morning.", "the answer that was to be replaced stays");
  assert.equal(await page.isVisible(".said.assistant"), true);
  assert.equal(await focused(page), "regenerate");
  await page.unroute(/completions$/);

  // What is typed meanwhile stays, too.
  await page.route(/completions$/, async route => {
    await page.fill("#prompt", "Meanwhile");
    await route.fulfill({ status: 429, contentType: "application/json", body: "{\"error\": {\"message\": \"busy\"}}" });
  });
  await say(page, "First");
  await page.waitForSelector("#error button");
  assert.equal(await page.inputValue("#prompt"), "Meanwhile");
  await page.click("#error button");
  assert.equal(await page.inputValue("#prompt"), "First\nMeanwhile");
  assert.equal(await page.isVisible("#error"), false);
  await page.unroute(/completions$/);

  // So does a message whose answer is stopped before it begins, and one that the page is loaded
  // again for.
  await standIn(page);
  await say(page, "Never mind");
  await page.keyboard.press("Escape");
  await done(page);
  assert.equal(await page.inputValue("#prompt"), "Never mind");
  assert.equal(await count(page, "user"), 1);
  await say(page, "Not yet");
  await page.reload();
  await ready(page);
  assert.equal(await page.inputValue("#prompt"), "Not yet");
  assert.equal(await count(page, "user"), 1);
  // An answer that breaks off stays.
  await standIn(page);
  await say(page, "Go on");
  await page.evaluate(() => window.piece("So far"));
  await page.waitForFunction(() => document.querySelectorAll(".said.assistant .text")[1]?.textContent === "So far");
  await page.reload();
  await ready(page);
  assert.deepEqual(await answers(page).allInnerTexts(), ["Good morning.", "So far"]);
  assert.match(await page.locator(".said.assistant .under").nth(1).innerText(), /stopped/);
  await context.close();
}

async function history() {
  const { page: first, faults, context } = await open(chat);
  await ready(first);
  await standIn(first);
  await exchange(first, "The first chat", "An answer\n\n- with\n- a list");
  await first.fill("#prompt", "A draft");
  await first.reload();
  await ready(first);
  assert.equal(await first.locator(".said.user .text").innerText(), "The first chat");
  assert.equal(await answers(first).locator("li").count(), 2);
  assert.equal(await first.inputValue("#prompt"), "A draft");

  // Another tab begins with a chat of its own; a third one shows the same as the first, and what
  // they write stays apart.
  const second = await context.newPage();
  await second.goto(chat);
  await ready(second);
  assert.equal(await count(second, "user"), 0);
  await standIn(second);
  await exchange(second, "The second chat", "Another answer");
  const third = await context.newPage();
  const id = await first.evaluate(() => sessionStorage.getItem("chat"));
  await third.addInitScript(id => { if (!sessionStorage.getItem("chat")) sessionStorage.setItem("chat", id); }, id);
  await third.goto(chat);
  await ready(third);
  assert.equal(await third.locator(".said.user .text").innerText(), "The first chat");
  for (const [page, name] of [[first, "first"], [third, "third"]]) {
    await standIn(page);
    await exchange(page, `From the ${name} tab`, `To the ${name}`);
  }
  for (const [page, wanted] of [
    [first, ["The first chat", "From the first tab"]],
    [second, ["The second chat"]],
    [third, ["The first chat", "From the third tab"]],
  ]) {
    await page.reload();
    await ready(page);
    assert.deepEqual(await page.locator(".said.user .text").allInnerTexts(), wanted);
  }

  // A list of them, from which they are opened and deleted.
  await first.click("#show-chats");
  assert.equal(await first.locator("#chat-list li").count(), 3);
  await picture(first, "chats");
  await first.click("#chat-list .open:has-text('The second chat')");
  assert.equal(await answers(first).innerText(), "Another answer");
  await first.click("#chat-list li:has([aria-current]) button:last-child");
  assert.equal(await count(first, "user"), 0);
  assert.equal(await first.locator("#chat-list li").count(), 2);
  assert.notEqual(await focused(first), "BODY");
  first.on("dialog", dialog => dialog.accept());
  await first.click("#delete-all");
  assert.equal(await first.locator("#chat-list li").count(), 0);
  assert.equal(await first.evaluate(() => Object.keys(localStorage).filter(name => name.startsWith("chat:")).length), 0);
  assert.equal(await focused(first), "new");
  await first.keyboard.press("Escape");

  await first.reload();
  await ready(first);
  assert.equal(await count(first, "user"), 0, "a new chat stays one");

  // No more than so much is kept: the oldest go first. Without room the page goes on, and says that
  // nothing is kept.
  await first.evaluate(() => {
    for (let at = 0; at < 120; at += 1) {
      const messages = [{ role: "user", content: `chat ${at} ${"x".repeat(30000)}` }, { role: "assistant", content: "" }];
      const one = { id: String(at), revision: "", converses: true, saved: at, messages };
      localStorage.setItem(`chat:${at}`, JSON.stringify(one));
    }
    localStorage.setItem("chat:broken", "{");
  });
  await standIn(first);
  await exchange(first, "Make room", "Done");
  const names = await first.evaluate(() => Object.keys(localStorage).filter(name => name.startsWith("chat:")));
  assert.ok(names.length < 70 && names.includes("chat:119"), names.join());
  assert.ok(!names.includes("chat:0") && !names.includes("chat:broken"), names.join());
  await first.evaluate(() => {
    Storage.prototype.setItem = () => { throw new DOMException("full", "QuotaExceededError"); };
  });
  await exchange(first, "More", "Still here");
  assert.match(await first.innerText("#notice"), /not saved/);
  assert.equal(await answers(first).nth(1).innerText(), "Still here");
  // Where a browser has no storage for it the page works all the same.
  const without = await context.newPage();
  await without.addInitScript(() => {
    for (const name of ["localStorage", "sessionStorage"]) {
      Object.defineProperty(window, name, { get() { throw new DOMException("blocked", "SecurityError"); } });
    }
  });
  await without.goto(chat);
  await ready(without);
  await standIn(without);
  await exchange(without, "Hello", "Good morning.");
  assert.equal(await answers(without).innerText(), "Good morning.");
  assert.match(await without.innerText("#notice"), /not saved/);
  assert.deepEqual(faults, []);
  await context.close();
}

// By the keyboard alone: the focus is never lost.
async function keyboard() {
  const { page, faults, context } = await open(chat);
  await ready(page);
  await standIn(page);
  assert.equal(await focused(page), "prompt");
  await page.keyboard.type("Hello");
  await page.keyboard.press("Tab");
  assert.equal(await focused(page), "send");
  await page.keyboard.press("Space");
  assert.equal(await focused(page), "stop");
  await page.evaluate(() => { window.piece("Good morning."); window.end(); });
  await done(page);
  assert.equal(await focused(page), "prompt");
  await page.focus(".regenerate");
  await page.keyboard.press("Enter");
  assert.equal(await focused(page), "stop");
  await page.evaluate(() => { window.piece("Good evening."); window.end(); });
  await done(page);
  assert.equal(await focused(page), "regenerate");
  await page.keyboard.press("Enter");
  await page.evaluate(() => window.piece("Good"));
  await page.waitForFunction(() => document.querySelector(".said.assistant:not([hidden]) .text").textContent === "Good");
  await page.keyboard.press("Space");
  await done(page);
  assert.equal(await focused(page), "prompt", "after Stop");
  assert.equal(await answers(page).innerText(), "Good");
  await say(page, "More");
  assert.equal(await focused(page), "prompt", "Enter leaves it where it is");
  await page.evaluate(() => { window.piece("More."); window.end(); });
  await done(page);
  assert.equal(await focused(page), "prompt");
  // A new chat while an answer is written: what comes is the old one's.
  await say(page, "Again");
  await page.evaluate(() => window.piece("And"));
  await page.focus("#new");
  await page.keyboard.press("Enter");
  await done(page);
  assert.equal(await focused(page), "prompt");
  assert.equal(await count(page, "assistant"), 0);
  await page.focus("#show-chats");
  await page.keyboard.press("Enter");
  assert.equal(await page.locator("#chat-list li").count(), 1);
  await page.keyboard.press("Escape");
  assert.equal(await focused(page), "show-chats");
  assert.deepEqual(faults, []);
  await context.close();
}

// Markdown and what the page makes of it, in short.
const CASES = {
  "a\n- b\n- c": "<p>a</p><ul><li>b</li><li>c</li></ul>",
  "- a\n  - b\n    - c\n- d": "<ul><li>a<ul><li>b<ul><li>c</li></ul></li></ul></li><li>d</li></ul>",
  "3. a\n4. b": "<ol start=\"3\"><li>a</li><li>b</li></ol>",
  "0) a": "<ol start=\"0\"><li>a</li></ol>",
  "- a\n\n- b": "<ul><li><p>a</p></li><li><p>b</p></li></ul>",
  "1. a\n\n   b\n2. c": "<ol><li><p>a</p><p>b</p></li><li><p>c</p></li></ol>",
  "1. a\n   ```sh\n   b\n     c\n   ```\n2. d": "<ol><li>a<pre><code>b\n  c</code></pre></li><li>d</li></ol>",
  "1. a\n\n       b": "<ol><li><p>a</p><pre><code>b</code></pre></li></ol>",
  "- [ ] a\n- [x] b": "<ul><li class=\"task\"><input type=\"checkbox\" disabled=\"\" aria-label=\"to do\"> a</li>"
    + "<li class=\"task\"><input type=\"checkbox\" disabled=\"\" aria-label=\"done\"> b</li></ul>",
  "- a\nb": "<ul><li>a\nb</li></ul>",
  "- a\n* b": "<ul><li>a</li></ul><ul><li>b</li></ul>",
  "In\n1984. No list": "<p>In\n1984. No list</p>",
  "> a\n> > b\n\n- > c":
    "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><ul><li><blockquote><p>c</p></blockquote></li></ul>",
  "a\n===\n\nb\n---": "<h3>a</h3><h4>b</h4>",
  "### a ###\n#b\n####### c": "<h5>a</h5><p>#b\n####### c</p>",
  "* * *\n___": "<hr><hr>",
  "*a **b** c* ***d*** **e*f*g**":
    "<p><em>a <strong>b</strong> c</em> <em><strong>d</strong></em> <strong>e<em>f</em>g</strong></p>",
  "snake_case_name _a_ __b__ 2*3*4 5 * 6": "<p>snake_case_name <em>a</em> <strong>b</strong> 2<em>3</em>4 5 * 6</p>",
  "\\*a\\* &lt;b&gt; &amp; <br>c": "<p>*a* &lt;b&gt; &amp; <br>c</p>",
  "``a`b`` ` c ` `**d**`": "<p><code>a`b</code> <code>c</code> <code>**d**</code></p>",
  "a  \nb\\\nc\nd": "<p>a<br>b<br>c\nd</p>",
  "~~a~~ ~b~ ~5": "<p><s>a</s> ~b~ ~5</p>",
  "[a](https://b.org/c_(d)) [*e*](<https://f.org> \"g\")":
    "<p><a href=\"https://b.org/c_(d)\">a</a> <a href=\"https://f.org/\" title=\"g\"><em>e</em></a></p>",
  "(https://a.org/b_(c)). <https://d.org> **https://e.org**":
    "<p>(<a href=\"https://a.org/b_(c)\">https://a.org/b_(c)</a>). <a href=\"https://d.org/\">https://d.org</a> "
    + "<strong><a href=\"https://e.org/\">https://e.org</a></strong></p>",
  "[a](javascript:alert(1)) <javascript:b> ![c](https://d.org/e.png)":
    "<p>[a](javascript:alert(1)) &lt;javascript:b&gt; <a href=\"https://d.org/e.png\">c</a></p>",
  "| a | b |\n|:-:|--:|\n| `c\\|d` | e |\n| f |\n\ng":
    "<table><thead><tr><th class=\"center\">a</th><th class=\"right\">b</th></tr></thead>"
    + "<tbody><tr><td class=\"center\"><code>c|d</code></td><td class=\"right\">e</td></tr>"
    + "<tr><td class=\"center\">f</td><td colspan=\"1\"></td></tr></tbody></table><p>g</p>",
  "~~~\na\n```\n\tb\n~~~\nc": "<pre><code>a\n```\n\tb</code></pre><p>c</p>",
  "    a\n\n    b\nc": "<pre><code>a\n\nb</code></pre><p>c</p>",
};

// Input that makes a careless Markdown parser slow, or run out of stack; a model that repeats
// itself writes the like.
const times = (text, count) => text.repeat(count);
const HOSTILE = {
  quotes: times(">", 3000),
  "quotes and spaces": times("> ", 50000),
  "a heading of spaces": `# a${times(" ", 60000)}b`,
  "a heading of marks": `# ${times("# ", 50000)}x`,
  stars: times("*", 100000),
  "open stars": times("*a ", 40000),
  underscores: times("_a", 50000),
  "emphasis within emphasis": times("*", 50000) + "a" + times("*", 50000),
  "the like of several kinds": times("**a _b ", 15000) + times("c_ d** ", 15000),
  "stars and underscores": times("*_", 50000) + "a" + times("_*", 50000),
  tildes: times("~~a ", 20000) + times("b~~ ", 20000),
  brackets: times("[", 100000),
  "open links": times("[a](", 25000),
  "open titles": times("[a](b \"", 15000),
  "angled links": times("[a](<b", 16000),
  links: times("[", 30000) + times("[a](http://x)", 5000),
  pictures: times("![a", 30000) + times("](http://x)", 10000),
  "closed brackets": times("](", 50000),
  parentheses: `[a](http://x${times("(", 100000)}`,
  backticks: times("`", 100000),
  "runs of backticks": Array.from({ length: 450 }, (_, at) => times("`", at + 1)).join(" "),
  codes: times("`a` ", 25000),
  angles: times("<http:", 16000),
  ampersands: times("&#", 50000),
  urls: times("http://", 15000),
  "a url's end": `http://a${times(")", 100000)}`,
  backslashes: times("\\\n", 50000),
  "a table": `|a|b|\n|-|-|\n${times("|a|b|\n", 16000)}`,
  "a wide table": `|${times("a|", 25000)}\n|${times("-|", 25000)}\n`,
  "a table with holes": `|${times("a|", 90)}\n|${times("-|", 90)}\n${times("|\n", 30000)}`,
  pipes: times("-|", 50000),
  rules: times("- ", 50000) + "x",
  items: times("- a\n", 25000),
  "items within items": times("1. ", 33000),
  "deep items": Array.from({ length: 400 }, (_, at) => `${times("  ", at)}- a`).join("\n"),
  "blank lines": `- a${times("\n", 100000)}b`,
  tabs: times("-\t", 50000),
  fences: times("```\n", 25000),
  paragraphs: times("a\n\n", 33000),
  "hard breaks": times("a  \n", 25000),
  "a long line": times("a", 500000),
  headings: times("# a\n", 25000),
  "marks on a letter": `a${times("\u0301", 50000)}`,
};

async function markdown() {
  const { page, faults, context } = await open(chat);
  await ready(page);
  for (const [text, wanted] of Object.entries(CASES)) {
    const made = await page.evaluate(text => {
      const into = document.createElement("div");
      for (const one of window.markdown(text)) into.append(one);
      // What is the same wherever it is.
      for (const block of into.querySelectorAll(".block")) block.replaceWith(block.querySelector("pre"));
      for (const scroll of into.querySelectorAll(".scroll")) scroll.replaceWith(...scroll.childNodes);
      for (const pre of into.querySelectorAll("pre")) pre.removeAttribute("tabindex");
      for (const a of into.querySelectorAll("a")) {
        if (a.rel !== "noopener noreferrer" || a.target !== "_blank") return `a link that tells where it is: ${a.outerHTML}`;
        a.setAttribute("href", a.href);
        for (const name of ["rel", "target"]) a.removeAttribute(name);
      }
      // Written piece by piece it is the same.
      const grown = document.createElement("div"), whole = document.createElement("div");
      const draw = window.growing(grown);
      for (let at = 1; at <= text.length; at += 1) draw(text.slice(0, at));
      for (const one of window.markdown(text)) whole.append(one);
      return grown.innerHTML === whole.innerHTML ? into.innerHTML : `grown: ${grown.innerHTML}`;
    }, text);
    assert.equal(made, wanted, text);
  }

  await standIn(page);
  for (const [name, text] of Object.entries(HOSTILE)) {
    await say(page, "Write");
    const took = await page.evaluate(async text => {
      const begun = performance.now();
      window.piece(text);
      window.end();
      while (document.querySelector("#stop").checkVisibility()) await new Promise(done => { setTimeout(done, 5); });
      const last = [...document.querySelectorAll(".said.assistant .text")].at(-1);
      last.getBoundingClientRect();
      await new Promise(done => { requestAnimationFrame(() => setTimeout(done)); });
      return last.childNodes.length && performance.now() - begun;
    }, text);
    assert.ok(took > 0 && took < 2000, `${name}: ${took} ms`);
    await page.click("#new");
  }
  // Piece by piece they do not stop the page, either.
  for (const name of ["stars", "brackets", "items", "a table", "quotes and spaces"]) {
    await say(page, "Write");
    const longest = await page.evaluate(async text => {
      let longest = 0;
      for (let at = 0; at < text.length; at += 50) {
        window.piece(text.slice(at, at + 50));
        const begun = performance.now();
        if (at % 500 === 0) await new Promise(done => { setTimeout(done); });
        longest = Math.max(longest, performance.now() - begun);
      }
      return longest;
    }, HOSTILE[name]);
    assert.ok(longest < 2000, `${name}: ${longest} ms`);
    await page.keyboard.press("Escape");
    await done(page);
    await page.click("#new");
  }
  // A chat that is full of them comes back.
  await page.evaluate(text => {
    const messages = Array.from({ length: 30 }, (_, at) => ({ role: at % 2 ? "assistant" : "user", content: at % 2 ? text : "Write" }));
    const full = { id: "full", revision: "", converses: true, saved: Date.now(), messages };
    localStorage.setItem("chat:full", JSON.stringify(full));
    sessionStorage.setItem("chat", "full");
  }, HOSTILE.headings);
  const begun = performance.now();
  await page.reload();
  await ready(page);
  assert.equal(await count(page, "assistant"), 15);
  assert.ok(performance.now() - begun < 8000, `${performance.now() - begun} ms until a full chat was there`);
  assert.equal(await page.locator(".said").first().locator(".text").innerText(), "Write");
  await page.click("#new");
  await standIn(page);
  await exchange(page, "Are you there?", "Yes.");
  assert.equal(await answers(page).innerText(), "Yes.");
  assert.deepEqual(faults, []);
  await context.close();
}

async function asksForKey() {
  const { page, context } = await open(keyed);
  await page.waitForSelector("#key");
  await page.waitForFunction(() => document.activeElement.id === "key");
  await page.fill("#key", "wrong");
  await page.dispatchEvent("#key", "change");
  await page.fill("#key", key);
  await page.dispatchEvent("#key", "change");
  await ready(page);
  await page.fill("#prompt", "Hello");
  await page.click("#send");
  await page.waitForSelector(".regenerate");
  await context.close();
}

for (const check of [conversation, phone, completion, longConversation, refusals, history, keyboard, markdown, asksForKey]) {
  await check();
  console.log(`page: ${check.name} is well`);
}
await browser.close();
