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

// --- Markdown as CommonMark and GitHub have it, but for HTML, which stays text, and references.
// Its time grows with the text's length alone, and what it makes is bounded, whatever a model
// writes.

const DEPTH = 32;           // lists, their items and quotes within each other
const INLINE_DEPTH = 12;    // emphasis within emphasis
const ELEMENTS = 10000;     // of an answer; what follows is shown as it was written
const COLUMNS = 100;        // of a table

function element(name, text, children = []) {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  for (const child of children) made.append(child);
  return made;
}

const isSpace = char => char === " " || char === "\t";

function runLength(text, at) {
  let end = at + 1;
  while (text[end] === text[at]) end += 1;
  return end - at;
}

// Whether a line is a rule: three or more of a character and nothing else.
function isRule(line, char) {
  let count = 0;
  for (const other of line) {
    if (other === char) count += 1;
    else if (!isSpace(other)) return false;
  }
  return count >= 3;
}

function headingText(line) {
  const text = line.trim();
  let end = text.length;
  while (text[end - 1] === "#") end -= 1;
  return end === 0 || isSpace(text[end - 1]) ? text.slice(0, end).trim() : text;
}

// The cells of a table's row.
function cells(line) {
  const text = line.trim();
  const found = [];
  let cell = "";
  for (let at = text[0] === "|" ? 1 : 0; at < text.length; at += 1) {
    if (text[at] === "\\" && text[at + 1] === "|") {
      cell += "|";
      at += 1;
    } else if (text[at] === "|") {
      found.push(cell.trim());
      cell = "";
    } else cell += text[at];
  }
  if (cell.trim()) found.push(cell.trim());
  return found;
}

// How the columns of a table are aligned, if the line says so.
function alignments(line) {
  if (!line.includes("|") || !line.includes("-")) return null;
  const found = cells(line);
  if (found.length > COLUMNS || !found.every(cell => /^:?-+:?$/.test(cell))) return null;
  return found.map(cell => {
    if (cell.endsWith(":")) return cell.startsWith(":") ? "center" : "right";
    return cell.startsWith(":") ? "left" : "";
  });
}

// The blocks of a text. Each has the line that it begins `from`; lists, items and quotes have
// blocks of their own.
function parse(lines) {
  const root = { kind: "root", blocks: [] };
  let open = [root];     // what the next line may go on with, outermost first
  let leaf = null;       // the paragraph, code or table in the innermost of them
  // From which depth on the line before was blank.
  let blank = Infinity;
  let number, text, at, column;
  let matched;           // of the open ones, by the line so far

  // The width of the white space that comes next, and where it ends.
  const indent = () => {
    let end = at, wide = column;
    for (; isSpace(text[end]); end += 1) wide += text[end] === "\t" ? 4 - wide % 4 : 1;
    return { width: wide - column, next: end };
  };
  const skip = width => {
    for (let end = column + width; column < end && at < text.length;) {
      const wide = text[at] === "\t" ? 4 - column % 4 : 1;
      // What a tab leaves of its width becomes spaces.
      if (column + wide > end) text = text.slice(0, at) + " ".repeat(wide) + text.slice(at + 1);
      else {
        at += 1;
        column += wide;
      }
    }
  };
  const add = block => {
    leaf = null;
    if (open.at(-1).kind === "list" && block.kind !== "item") open.pop();
    const parent = open.at(-1);
    if (parent.blocks.length && blank < open.length) {
      if (parent.kind === "list") parent.loose = true;
      if (parent.kind === "item") open.at(-2).loose = true;
    }
    block.from = number;
    parent.blocks.push(block);
    return block;
  };
  // What the line does not go on with ends, once something else begins.
  const end = () => { open.length = matched; };
  // A line that begins a block, or several within each other. Whether it is done with then.
  const begin = () => {
    for (;;) {
      const { width, next } = indent();
      if (next === text.length) return false;
      const within = leaf !== null && leaf.kind === "paragraph";
      if (width > 3) {
        if (within) return false;
        end();
        skip(4);
        leaf = add({ kind: "code", language: "", lines: [text.slice(at)] });
        return true;
      }
      const char = text[next];
      if (char === ">" && matched < DEPTH) {
        end();
        column += width + 1;
        at = next + 1;
        if (isSpace(text[at])) skip(1);
        open.push(add({ kind: "quote", blocks: [] }));
        matched = open.length;
        continue;
      }
      const run = runLength(text, next);
      if (char === "#" && run < 7 && (next + run === text.length || isSpace(text[next + run]))) {
        end();
        add({ kind: "heading", level: run, text: headingText(text.slice(next + run)) });
        return true;
      }
      if ((char === "`" || char === "~") && run > 2) {
        const info = text.slice(next + run).trim();
        if (char === "~" || !info.includes("`")) {
          end();
          const language = /^[^\s{]*/.exec(info)[0];
          leaf = add({ kind: "fence", char, run, width, language, lines: [] });
          return true;
        }
      }
      if ((char === "=" || char === "-") && within && matched === open.length && !text.slice(next + run).trim()) {
        leaf.kind = "heading";
        leaf.level = char === "=" ? 1 : 2;
        leaf.text = leaf.lines.join("\n").trim();
        leaf = null;
        return true;
      }
      if ("*-_".includes(char) && isRule(text.slice(next), char)) {
        end();
        add({ kind: "rule" });
        return true;
      }
      const bullet = "*+-".includes(char);
      const digits = bullet ? "" : /^\d{0,9}/.exec(text.slice(next, next + 9))[0];
      const marker = next + digits.length;
      if (!bullet && !(digits && (text[marker] === "." || text[marker] === ")"))) return false;
      if (marker + 1 < text.length && !isSpace(text[marker + 1])) return false;
      const empty = !text.slice(marker + 1).trim();
      if (within && matched === open.length && (empty || (digits && Number(digits) !== 1))) return false;
      if (matched + 2 > DEPTH) return false;
      end();
      const mark = text[marker];
      if (open.at(-1).kind === "list" && open.at(-1).mark !== mark) open.pop();
      if (open.at(-1).kind !== "list") {
        open.push(add({ kind: "list", mark, start: digits && Number(digits), loose: false, blocks: [] }));
      }
      column += width + digits.length + 1;
      at = marker + 1;
      const gap = indent().width;
      const own = empty || gap > 4 ? 1 : gap;
      skip(own);
      open.push(add({ kind: "item", indent: width + digits.length + 1 + own, blocks: [] }));
      matched = open.length;
    }
  };

  for (number = 0; number < lines.length; number += 1) {
    text = lines[number];
    at = column = 0;
    let quoted = 0;
    for (matched = 1; matched < open.length; matched += 1) {
      const box = open[matched];
      const { width, next } = indent();
      if (box.kind === "quote") {
        if (width > 3 || text[next] !== ">") break;
        column += width + 1;
        at = next + 1;
        if (isSpace(text[at])) skip(1);
        quoted = matched;
      } else if (box.kind === "item") {
        const isBlank = next === text.length;
        if (isBlank ? !box.blocks.length : width < box.indent) break;
        skip(Math.min(width, box.indent));
      }
    }
    const all = matched === open.length;
    const { width, next } = indent();
    const isBlank = next === text.length;
    if (all && leaf !== null && leaf.kind === "fence") {
      const ends = width < 4 && text[next] === leaf.char && runLength(text, next) >= leaf.run
        && !text.slice(next + runLength(text, next)).trim();
      skip(Math.min(width, leaf.width));
      if (ends) leaf = null;
      else leaf.lines.push(text.slice(at));
      blank = Infinity;
      continue;
    }
    if (all && leaf !== null && leaf.kind === "code" && (isBlank || width > 3)) {
      skip(4);
      leaf.lines.push(text.slice(at));
      blank = isBlank ? quoted : Infinity;
      continue;
    }
    if (isBlank) {
      end();
      leaf = null;
      blank = quoted;
      continue;
    }
    if (!all && leaf !== null && leaf.kind !== "paragraph") leaf = null;
    if (!begin()) {
      // The rest of what began on this line, or a line of a paragraph, which needs no marks of what
      // it is in.
      const rest = text.slice(indent().next);
      if (!rest) {
        blank = Infinity;
        continue;
      }
      const parent = leaf !== null && leaf.kind;
      const aligned = parent === "paragraph" && all && alignments(rest);
      if (aligned && cells(leaf.lines.at(-1)).length === aligned.length) {
        const head = leaf.lines.pop();
        const siblings = open.at(-1).blocks;
        if (!leaf.lines.length) siblings.pop();
        leaf = add({ kind: "table", aligned, rows: [head] });
        leaf.from = number - 1;
      } else if (parent === "paragraph") leaf.lines.push(rest);
      else if (parent === "table") leaf.rows.push(rest);
      else {
        end();
        leaf = add({ kind: "paragraph", lines: [rest] });
      }
    }
    blank = Infinity;
  }
  return root.blocks;
}

const ENTITIES = {
  amp: "&", lt: "<", gt: ">", quot: "\"", apos: "'", nbsp: "\u00a0", copy: "\u00a9", reg: "\u00ae", deg: "\u00b0",
  times: "\u00d7", middot: "\u00b7", hellip: "\u2026", mdash: "\u2014", ndash: "\u2013", rarr: "\u2192", larr: "\u2190",
  le: "\u2264", ge: "\u2265", ne: "\u2260",
};

function entity(name) {
  if (name[0] !== "#") return Object.hasOwn(ENTITIES, name) ? ENTITIES[name] : `&${name};`;
  const code = /^#x/i.test(name) ? parseInt(name.slice(2), 16) : Number(name.slice(1));
  return code > 0 && code < 0x110000 && (code < 0xd800 || code > 0xdfff) ? String.fromCodePoint(code) : "\ufffd";
}

const unescaped = text => text
  .replace(/\\([!-/:-@[-`{-~])|&(#\d{1,7}|#x[\da-f]{1,6}|[a-z]\w{1,9});/gi, (_, char, name) => char || entity(name));

function link(url, children) {
  const made = element("a", "", children);
  made.href = url;
  made.rel = "noopener noreferrer";
  made.target = "_blank";
  return made;
}

function matchAt(pattern, text, at) {
  pattern.lastIndex = at;
  return pattern.exec(text);
}

const SPACES = /[ \t\n]*/y;
const TITLE = /"[^"\\]*(?:\\[^][^"\\]*)*"|'[^'\\]*(?:\\[^][^'\\]*)*'|\([^()\\]*(?:\\[^][^()\\]*)*\)/y;
const ANGLED = /<([^<>\n\\]*(?:\\.[^<>\n\\]*)*)>/y;
const LINKED = /^(?:https?:\/\/|mailto:)/i;

// What stands behind a link's text, `(URL "title")`, from its parenthesis on.
function target(text, at) {
  at += 1 + matchAt(SPACES, text, at + 1)[0].length;
  const angled = matchAt(ANGLED, text, at);
  let url = "";
  if (angled) {
    url = angled[1];
    at += angled[0].length;
  } else {
    const begun = at;
    for (let depth = 0; at < text.length && text[at] > " "; at += 1) {
      if (text[at] === "\\" && text[at + 1] > " ") at += 1;
      else if (text[at] === "(" && (depth += 1) > 8) return null;
      else if (text[at] === ")" && (depth -= 1) < 0) break;
    }
    url = text.slice(begun, at);
  }
  const spaces = matchAt(SPACES, text, at)[0].length;
  at += spaces;
  const title = spaces ? matchAt(TITLE, text, at) : null;
  if (title) at += title[0].length + matchAt(SPACES, text, at + title[0].length)[0].length;
  url = unescaped(url);
  if (text[at] !== ")" || !LINKED.test(url)) return null;
  return { url, title: title ? unescaped(title[0].slice(1, -1)) : "", end: at + 1 };
}

const SPECIAL = /[\\`*_~[\]!<&\n]|https?:\/\//gi;
const ESCAPED = /\\([!-/:-@[-`{-~])/y;
const ENTITY = /&(#\d{1,7}|#x[\da-f]{1,6}|[a-z]\w{1,9});/iy;
const ANGLED_URL = /<((?:https?:\/\/|mailto:)[^\s<>]*)>/iy;
const BREAK = /<br ?\/?>/iy;
const BARE_URL = /[^\s<>[\]"`*]+/y;
const MARK = /[\p{P}\p{S}]/u;

// A URL that stands in a text goes on to its last character that is no punctuation of the sentence
// around it.
function bareUrl(text, at) {
  const found = matchAt(BARE_URL, text, at)[0];
  let end = found.length, closing = 0;
  for (const char of found) closing += char === ")" ? 1 : char === "(" ? -1 : 0;
  for (; end > 0; end -= 1) {
    if (found[end - 1] === ")" && closing > 0) closing -= 1;
    else if (!"?!.,:;_~'".includes(found[end - 1])) break;
  }
  return found.slice(0, end);
}

// What is within a line. Delimiters of emphasis and links are kept in a list until others close
// them, as CommonMark's description of a parser has it, with texts and elements in another.
function inline(text, budget) {
  const first = { next: null };
  let tail = first;
  let last = null;          // of the delimiters
  const brackets = [];
  let pictures = 0;         // among the brackets
  let runs = null;          // where runs of backticks are, by their length

  const push = item => {
    item.prev = tail;
    item.next = null;
    tail.next = item;
    tail = item;
    return item;
  };
  const say = said => {
    if (said) push({ text: said, depth: 0 });
  };
  const place = (made, item = {}) => {
    budget.left -= 1;
    return push({ made, depth: 1, ...item });
  };
  // What is between two items, as nodes; texts that follow each other become one.
  const between = (from, to, flat) => {
    const nodes = [];
    let held = "";
    for (let item = from.next; item !== to; item = item.next) {
      if (item.made === undefined) held += item.text;
      else if (flat && item.flat !== undefined) held += item.flat;
      else {
        if (held) nodes.push(held);
        held = "";
        nodes.push(item.made);
      }
    }
    if (held) nodes.push(held);
    return nodes;
  };
  const depthOf = (from, to) => {
    let depth = 0;
    for (let item = from.next; item !== to; item = item.next) depth = Math.max(depth, item.depth);
    return depth;
  };
  const remove = delimiter => {
    if (delimiter.next) delimiter.next.prev = delimiter.prev;
    else last = delimiter.prev;
    if (delimiter.prev) delimiter.prev.next = delimiter.next;
  };
  const fits = (opener, closer) => opener.char === closer.char && opener.opens
    && (opener.char !== "~" || opener.count === closer.count)
    && !((opener.closes || closer.opens) && (opener.length + closer.length) % 3 === 0 && closer.length % 3 !== 0);
  // Emphasis of the delimiters behind one.
  const emphasize = bottom => {
    const floors = new Map();
    let closer = last;
    while (closer && closer.prev !== bottom) closer = closer.prev;
    while (closer) {
      if (!closer.closes) {
        closer = closer.next;
        continue;
      }
      const kind = closer.char + closer.opens + closer.length % 3;
      const floor = floors.get(kind) ?? -1;
      let opener = closer.prev;
      while (opener !== bottom && opener.at >= floor && !fits(opener, closer)) opener = opener.prev;
      if (opener === bottom || opener.at < floor) {
        // Nothing before this one opens what others of its kind close.
        floors.set(kind, closer.at);
        const next = closer.next;
        if (!closer.opens) remove(closer);
        closer = next;
        continue;
      }
      while (closer.prev !== opener) remove(closer.prev);
      const depth = depthOf(opener.item, closer.item);
      if (depth >= INLINE_DEPTH || budget.left <= 0) {
        // Nor may anything be around these.
        while (closer.prev !== bottom) remove(closer.prev);
        const next = closer.next;
        remove(closer);
        closer = next;
        continue;
      }
      const used = opener.char === "~" ? opener.count : Math.min(2, opener.count, closer.count);
      const name = opener.char === "~" ? "s" : used === 2 ? "strong" : "em";
      budget.left -= 1;
      const made = { made: element(name, "", between(opener.item, closer.item)), depth: depth + 1 };
      made.prev = opener.item;
      made.next = closer.item;
      opener.item.next = closer.item.prev = made;
      for (const one of [opener, closer]) {
        one.count -= used;
        one.item.text = one.char.repeat(one.count);
      }
      if (!opener.count) remove(opener);
      if (!closer.count) {
        const next = closer.next;
        remove(closer);
        closer = next;
      }
    }
    last = bottom;
    if (bottom) bottom.next = null;
  };
  // A link or a picture, which becomes a link: nothing is loaded from elsewhere.
  const close = (bracket, { url, title, end }) => {
    emphasize(bracket.last);
    const nodes = between(bracket.item, null, true);
    const made = link(url, nodes);
    if (!made.textContent) made.textContent = url;
    if (title) made.title = title;
    const depth = 1 + depthOf(bracket.item, null);
    tail = bracket.item.prev;
    tail.next = null;
    if (bracket.picture) made.textContent = made.textContent.slice(0, 1000);
    place(made, { depth, flat: made.textContent });
    // There are no links within links.
    if (!bracket.picture) brackets.length = pictures = 0;
    return end;
  };

  let at = 0;
  while (at < text.length) {
    const found = budget.left > 0 ? matchAt(SPECIAL, text, at) : null;
    const next = found ? found.index : text.length;
    const plain = text.slice(at, next);
    if (!found) {
      say(plain);
      break;
    }
    at = next;
    const char = text[at];
    if (char === "\n") {
      say(plain.trimEnd());
      if (plain.endsWith("  ")) place(element("br"));
      else say("\n");
      at += 1 + matchAt(SPACES, text, at + 1)[0].length;
      continue;
    }
    say(plain);
    if (char === "\\") {
      const escaped = matchAt(ESCAPED, text, at);
      if (text[at + 1] === "\n") place(element("br"));
      else say(escaped ? escaped[1] : char);
      at += escaped || text[at + 1] === "\n" ? 2 : 1;
    } else if (char === "`") {
      if (!runs) {
        runs = new Map();
        for (let run of text.matchAll(/`+/g)) {
          const length = run[0].length;
          if (!runs.has(length)) runs.set(length, { at: 0, places: [] });
          runs.get(length).places.push(run.index);
        }
      }
      const length = runLength(text, at);
      const same = runs.get(length);
      while (same && same.places[same.at] <= at) same.at += 1;
      const end = same ? same.places[same.at] : undefined;
      if (end === undefined) {
        say("`".repeat(length));
        at += length;
      } else {
        let code = text.slice(at + length, end).replaceAll("\n", " ");
        if (code[0] === " " && code.at(-1) === " " && code.trim()) code = code.slice(1, -1);
        place(element("code", code));
        at = end + length;
      }
    } else if (char === "*" || char === "_" || char === "~") {
      const length = runLength(text, at);
      const before = at ? [...text.slice(Math.max(0, at - 2), at)].at(-1) : " ";
      const after = at + length < text.length ? String.fromCodePoint(text.codePointAt(at + length)) : " ";
      const spaced = !before.trim(), spacedAfter = !after.trim();
      const marked = MARK.test(before), markedAfter = MARK.test(after);
      const left = !spacedAfter && (!markedAfter || spaced || marked);
      const right = !spaced && (!marked || spacedAfter || markedAfter);
      const item = push({ text: text.slice(at, at + length), depth: 0 });
      if (char !== "~" || length === 2) {
        const opens = char === "_" ? left && (!right || marked) : left;
        const closes = char === "_" ? right && (!left || markedAfter) : right;
        const delimiter = { char, count: length, length, opens, closes, item, at, prev: last, next: null };
        if (last) last.next = delimiter;
        last = delimiter;
      }
      at += length;
    } else if (char === "[" || (char === "!" && text[at + 1] === "[")) {
      const picture = char === "!" && !pictures;
      const item = push({ text: picture ? "![" : text[at], depth: 0 });
      if (picture || char === "[") brackets.push({ picture, item, last });
      pictures += picture ? 1 : 0;
      at += picture ? 2 : 1;
    } else if (char === "]") {
      const bracket = brackets.pop();
      if (bracket && bracket.picture) pictures = 0;
      const goal = bracket && text[at + 1] === "(" ? target(text, at + 1) : null;
      if (goal) at = close(bracket, goal);
      else {
        say(char);
        at += 1;
      }
    } else if (char === "<") {
      const angled = matchAt(ANGLED_URL, text, at);
      const rule = matchAt(BREAK, text, at);
      if (angled) place(link(angled[1], [angled[1].replace(/^mailto:/i, "")]), { flat: angled[1] });
      else if (rule) place(element("br"));
      else say(char);
      at += angled ? angled[0].length : rule ? rule[0].length : 1;
    } else if (char === "&") {
      const found = matchAt(ENTITY, text, at);
      say(found ? entity(found[1]) : char);
      at += found ? found[0].length : 1;
    } else if (char === "!") {
      say(char);
      at += 1;
    } else {
      const url = bareUrl(text, at);
      if (url.length > found[0].length && !/\w/.test(text[at - 1] || "")) place(link(url, [url]), { flat: url });
      else say(url || char);
      at += url.length || 1;
    }
  }
  emphasize(null);
  return between(first, null);
}

function codeBlock(code, language, budget) {
  budget.left -= 5;
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
  const pre = element("pre", "", [element("code", code)]);
  pre.tabIndex = 0;
  const bar = element("div", "", [element("span", language), copy]);
  bar.className = "bar";
  const block = element("div", "", [bar, pre]);
  block.className = "block";
  return block;
}

// Blocks as elements, one for each, until the budget is spent: the lines of the others follow as
// they are.
function drawn(blocks, lines, budget, end = lines.length) {
  const made = [];
  const rest = from => {
    const plain = element("div", lines.slice(from, end).join("\n"));
    plain.className = "plain";
    return plain;
  };
  const row = (name, line, aligned) => {
    const found = cells(line).slice(0, aligned.length);
    const row = element("tr", "", found.map((cell, at) => {
      const made = element(name, "", inline(cell, budget));
      if (aligned[at]) made.className = aligned[at];
      return made;
    }));
    // Browsers lay out empty places, too.
    budget.left -= 2 + aligned.length;
    if (found.length < aligned.length) {
      const empty = element("td");
      empty.colSpan = aligned.length - found.length;
      row.append(empty);
    }
    return row;
  };
  const item = (block, loose, end) => {
    const [first] = block.blocks;
    const task = first && first.kind === "paragraph" && /^\[([ xX])\][ \t]/.exec(first.lines[0]);
    if (task) first.lines[0] = first.lines[0].slice(task[0].length).trimStart();
    const made = element("li");
    for (const inner of drawn(block.blocks, lines, budget, end)) {
      // Items of a tight list have their text without a paragraph.
      if (loose || inner.nodeName !== "P") made.append(inner);
      else while (inner.firstChild) made.append(inner.firstChild);
    }
    if (task) {
      const box = element("input");
      box.type = "checkbox";
      box.disabled = true;
      box.checked = task[1] !== " ";
      box.ariaLabel = box.checked ? "done" : "to do";
      made.className = "task";
      (loose && made.firstElementChild ? made.firstElementChild : made).prepend(box, " ");
    }
    return made;
  };
  for (const [at, block] of blocks.entries()) {
    if (budget.left <= 0) {
      made.push(rest(block.from));
      break;
    }
    budget.left -= 1;
    const next = at + 1 < blocks.length ? blocks[at + 1].from : end;
    if (block.kind === "paragraph") made.push(element("p", "", inline(block.lines.join("\n").trimEnd(), budget)));
    else if (block.kind === "heading") {
      // Beneath those of the page itself.
      made.push(element(`h${Math.min(block.level + 2, 6)}`, "", inline(block.text, budget)));
    } else if (block.kind === "rule") made.push(element("hr"));
    else if (block.kind === "fence") made.push(codeBlock(block.lines.join("\n"), block.language, budget));
    else if (block.kind === "code") {
      while (!block.lines.at(-1).trim()) block.lines.pop();
      made.push(codeBlock(block.lines.join("\n"), "", budget));
    } else if (block.kind === "quote") made.push(element("blockquote", "", drawn(block.blocks, lines, budget, next)));
    else if (block.kind === "list") {
      const list = element(block.start === "" ? "ul" : "ol");
      if (block.start > 1 || block.start === 0) list.start = block.start;
      for (const [at, one] of block.blocks.entries()) {
        const end = at + 1 < block.blocks.length ? block.blocks[at + 1].from : next;
        if (budget.left <= 0) {
          list.append(element("li", "", drawn([one], lines, budget, next)));
          break;
        }
        budget.left -= 1;
        list.append(item(one, block.loose, end));
      }
      made.push(list);
    } else {
      const body = element("tbody");
      const table = element("table", "", [element("thead", "", [row("th", block.rows[0], block.aligned)]), body]);
      for (let at = 1; at < block.rows.length; at += 1) {
        if (budget.left <= 0) {
          const plain = element("td", block.rows.slice(at).join("\n"));
          plain.className = "plain";
          plain.colSpan = block.aligned.length;
          body.append(element("tr", "", [plain]));
          break;
        }
        body.append(row("td", block.rows[at], block.aligned));
      }
      const scroll = element("div", "", [table]);
      scroll.className = "scroll";
      scroll.tabIndex = 0;
      scroll.role = "group";
      scroll.ariaLabel = "Table";
      made.push(scroll);
    }
  }
  return made;
}

// Browsers take seconds to set a character with thousands of marks.
const readable = text => text.replace(/(\p{M}{30})\p{M}+/gu, "$1\ufffd");

function markdown(text) {
  const lines = readable(text).replaceAll("\r\n", "\n").split("\n");
  return drawn(parse(lines), lines, { left: ELEMENTS });
}

// Draws a text that grows: blocks that two others follow do not change any more, and stay.
function growing(into) {
  let characters = 0, children = 0, elements = 0;
  return text => {
    const lines = readable(text).replaceAll("\r\n", "\n").slice(characters).split("\n");
    const blocks = parse(lines);
    const budget = { left: ELEMENTS - elements };
    while (into.childNodes.length > children) into.lastChild.remove();
    const done = Math.max(0, blocks.length - 2);
    const from = done ? blocks[done].from : 0;
    for (const made of drawn(blocks.slice(0, done), lines, budget, from)) into.append(made);
    if (done && budget.left > 0) {
      for (const line of lines.slice(0, from)) characters += line.length + 1;
      children += done;
      elements = ELEMENTS - budget.left;
    }
    for (const made of drawn(blocks.slice(done), lines, budget)) into.append(made);
  };
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
  const article = element("article", "", [element("h2", NAMES[message.role]), text, under]);
  article.className = `said ${message.role}`;
  $("log").append(article);
  let draw = said => { text.textContent = readable(said); };
  if (message.role === "assistant" && chats()) draw = growing(text);
  else text.classList.add("plain");
  draw(message.content);
  return { message, article, text, under, draw };
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
  let first = 0, tokens = 0, timer = 0, wait = 0, complete = false;
  // The longer it takes, the more rarely.
  const redraw = () => {
    timer = 0;
    const begun = performance.now(), follow = atEnd();
    shown.draw(message.content);
    if (follow) toEnd();
    wait = Math.max(50, 4 * (performance.now() - begun));
  };
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
      timer ||= setTimeout(redraw, wait);
    }
    if (!complete) throw new Error("the connection broke off");
  } catch (error) {
    if (error.name !== "AbortError") fail(error.message);
  }
  clearTimeout(timer);
  // What came nearly all at once is measured from the question on: how long it took to arrive says nothing.
  const now = performance.now(), seconds = (now - (now - first < 100 ? begun : first)) / 1000, speed = tokens / seconds;
  running = null;
  busy(false);
  shown.text.classList.remove("cursor");
  shown.draw(message.content);
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
