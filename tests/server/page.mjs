// The page in a browser: `node page.mjs CHROMIUM CHAT_URL STORIES_URL KEYED_URL KEY [SCREENSHOTS]`. Needs playwright-core.

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

  // An answer that goes on is stopped, and stays as far as it came. Here one that never ends takes the model's place.
  await page.evaluate(() => {
    const real = window.fetch;
    window.fetch = (url, options) => {
      window.fetch = real;
      window.asked = JSON.parse(options.body);
      const piece = JSON.stringify({ choices: [{ delta: { content: "On and on" } }] });
      return Promise.resolve(new Response(new ReadableStream({
        start(stream) {
          stream.enqueue(new TextEncoder().encode(`data: ${piece}\n\n`));
          options.signal.onabort = () => stream.error(options.signal.reason);
        },
      })));
    };
  });
  await page.fill("#prompt", "How long?");
  await page.click("#send");
  await page.waitForFunction(() => document.querySelectorAll(".said.assistant .text")[1]?.textContent === "On and on");
  assert.equal(await page.isVisible("#stop"), true);
  await page.keyboard.press("Escape");
  await done(page);
  assert.equal(await page.locator(".said.assistant .under").nth(1).innerText(), "stopped\nRegenerate");
  const asked = await page.evaluate(() => window.asked);
  assert.deepEqual(asked.messages.map(message => message.role), ["system", "user", "assistant", "user"]);
  assert.equal(asked.max_tokens, 30);

  // An error is told, and the conversation goes on.
  await page.route("**/v1/chat/completions", route => route.fulfill({
    status: 429, contentType: "application/json", body: JSON.stringify({ error: { message: "too many texts wait already" } }),
  }));
  await page.fill("#prompt", "Again");
  await page.click("#send");
  await page.waitForSelector("#error:not([hidden])");
  assert.equal(await page.innerText("#error"), "too many texts wait already");
  await page.unroute("**/v1/chat/completions");
  await page.click("#new");
  assert.equal(await count(page, "user") + await count(page, "assistant"), 0);
  assert.equal(await page.isVisible("#error"), false);

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
      return [...document.querySelectorAll("h1, h2, p, label, button, code, a, td, .under span")].filter(one => {
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
  await page.click("#show-settings");
  await picture(page, "narrow-settings");
  await page.click("#show-settings");
  assert.deepEqual(faults, []);
  await context.close();
}

async function completion() {
  const { page, faults, context } = await open(stories);
  await ready(page);
  // The likeliest tokens: a draw may end a text at once.
  await page.click("#show-settings");
  await page.fill("#temperature", "0");
  await page.keyboard.press("Escape");
  await page.fill("#prompt", "There was once a");
  await page.keyboard.press("Enter");
  await done(page);
  const words = (await page.locator(".said.assistant .text").innerText()).trim().split(/\s+/);
  assert.ok(words.length > 20, words.join(" "));
  await picture(page, "stories");
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

for (const check of [conversation, phone, completion, asksForKey]) {
  await check();
  console.log(`page: ${check.name} is well`);
}
await browser.close();
