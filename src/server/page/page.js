"use strict";
// A conversation with the model that this server has. Nothing is loaded from elsewhere, and what a
// model writes becomes text nodes, never markup.

const $ = id => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];
let model = null;      // as /v1/models tells of it
let running = null;    // aborts the answer that is being written

// --- storage that may not be there (private windows, blocked by settings)

function keep(store, name, value) {
  try { value ? window[store].setItem(name, value) : window[store].removeItem(name); } catch { /* not kept */ }
}

function kept(store, name) {
  try { return window[store].getItem(name) || ""; } catch { return ""; }
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
// them, as CommonMark's description of a parser has it, with text and elements in another.
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
  // Nodes for the content between two items; adjacent text is joined.
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

// --- chats, which this browser keeps

const CHAT = "chat:";        // what the names of their entries begin with
const CHATS = 100;           // so many are kept
const CHARACTERS = 2e6;      // of all of them; browsers keep 5 million in all
const SAVE_EVERY = 1000;     // milliseconds, while an answer is written

const random = () => Math.random().toString(36).slice(2) + Date.now().toString(36);
const converses = () => model !== null && model.paths.includes("/v1/chat/completions");
const newChat = () => ({ id: random(), revision: "", converses: converses(), cut: 0, messages: [] });
let chat = newChat();        // `rate` of a chat are its tokens a character, once they are known
let letGo = () => {};        // of the chat's lock

function read(name) {
  try {
    const value = JSON.parse(localStorage.getItem(name));
    const { id, revision, cut, messages, saved, converses } = value;
    const known = messages.every(one => ["user", "assistant"].includes(one.role) && typeof one.content === "string");
    if (!known || !messages.length || name !== CHAT + id) return null;
    return { id, revision, cut: value.context === context() ? cut : 0, saved: Number(saved) || 0, converses, messages };
  } catch {
    return null;
  }
}

function names() {
  try { return Object.keys(localStorage).filter(name => name.startsWith(CHAT)); } catch { return []; }
}

// Those of a model of this kind, the newest first.
function keptChats() {
  const found = names().map(read).filter(one => one !== null && one.converses === converses());
  return found.sort((a, b) => b.saved - a.saved);
}

// Another tab may have gone on with the chat since: then this tab's becomes a chat of its own.
function save(one) {
  if (one.deleted) return;
  const before = read(CHAT + one.id);
  if (before && before.revision !== one.revision) {
    one.id = random();
    if (one === chat) hold();
  }
  if (!one.messages.length) return keep("localStorage", CHAT + one.id, "");
  const revision = random();
  const text = JSON.stringify({ ...one, rate: undefined, revision, context: context(), saved: Date.now() });
  const told = "This chat is not saved: the browser's storage is full.";
  if (text.length > CHARACTERS) return note(told);
  // The oldest make room.
  const others = names().filter(name => name !== CHAT + one.id);
  let size = others.reduce((sum, name) => sum + kept("localStorage", name).length, text.length);
  let sorted = false;
  for (;;) {
    try {
      if (size <= CHARACTERS && others.length < CHATS) {
        localStorage.setItem(CHAT + one.id, text);
        one.revision = revision;
        if (!$("chats").hidden) listChats();
        return note("");
      }
    } catch (error) {
      if (error.name !== "QuotaExceededError" || !others.length) return note(told);
    }
    if (!sorted) {
      const when = new Map(others.map(name => [name, read(name)?.saved ?? 0]));
      others.sort((a, b) => when.get(b) - when.get(a));
      sorted = true;
    }
    const oldest = others.pop();
    size -= kept("localStorage", oldest).length;
    keep("localStorage", oldest, "");
  }
}

// Tells other tabs that this one shows the chat, where the browser has locks.
function hold() {
  letGo();
  letGo = () => {};
  keep("sessionStorage", "chat", chat.id);
  navigator.locks?.request(CHAT + chat.id, { ifAvailable: true }, lock => lock && new Promise(done => { letGo = done; }))
    .catch(() => {});
}

// What this tab showed before it was loaded again, or else the newest chat that no other tab shows.
async function restore() {
  const id = kept("sessionStorage", "chat"), own = read(CHAT + id);
  if (id && (!own || own.converses === converses())) return open(own ?? newChat());
  let held = [];
  try { held = (await navigator.locks.query()).held.map(lock => lock.name); } catch { /* no locks here */ }
  if (chat.messages.length) return;
  open(keptChats().find(one => !held.includes(CHAT + one.id)) ?? newChat());
}

function titleOf(one) {
  const title = one.messages[0].content.trim().replace(/\s+/g, " ").slice(0, 80);
  return title || "(empty)";
}

function listChats() {
  const found = keptChats();
  $("chat-list").replaceChildren(...found.map(one => {
    const title = titleOf(one);
    const when = new Date(one.saved).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
    const shown = element("button", title, [element("small", when)]);
    shown.type = "button";
    shown.className = "open";
    if (one.id === chat.id) shown.ariaCurrent = "true";
    shown.onclick = () => {
      const now = read(CHAT + one.id);
      if (now === null) return listChats();
      open(now);
      if (matchMedia("(max-width: 45rem)").matches) toggle("chats", false);
      else listChats();
      rest();
    };
    const gone = element("button", "Delete");
    gone.type = "button";
    gone.ariaLabel = `Delete chat: ${title}`;
    gone.onclick = () => {
      const at = [...$("chat-list").children].indexOf(gone.parentElement);
      forget([CHAT + one.id]);
      const left = $("chat-list").children;
      (left.length ? left[Math.min(at, left.length - 1)].lastElementChild : $("new")).focus();
    };
    return element("li", "", [shown, gone]);
  }));
  $("kept").textContent = found.length ? "Chats are saved in this browser only." : "No chats yet.";
  $("delete-all").hidden = !found.length;
}

function forget(gone) {
  for (const name of gone) keep("localStorage", name, "");
  if (gone.includes(CHAT + chat.id)) {
    chat.deleted = true;
    open(newChat());
  }
  listChats();
}

// --- the conversation on the page

const NAMES = { user: "You", assistant: "Answer" };
let views = new Map();       // elements of messages

function show(message, plain = message.role === "user" || !chat.converses) {
  $("empty").hidden = true;
  const text = element("div");
  text.className = "text";
  const under = element("div");
  under.className = "under";
  const article = element("article", "", [element("h2", NAMES[message.role]), text, under]);
  article.className = `said ${message.role}`;
  $("log").append(article);
  let draw = said => { text.textContent = readable(said); };
  if (plain) text.classList.add("plain");
  else draw = growing(text);
  draw(message.content);
  const view = { message, article, text, under, draw };
  views.set(message, view);
  return view;
}

// The line under a complete answer.
function tell({ message, under }) {
  const empty = message.content.trim() ? [] : [element("span", "The model returned no text.")];
  under.replaceChildren(...empty, ...message.told ? [element("span", message.told)] : []);
}

// The last answer can be regenerated.
function offer() {
  document.querySelectorAll(".regenerate").forEach(button => button.remove());
  const last = chat.messages.at(-1);
  if (running || !last || last.role !== "assistant") return null;
  const again = element("button", "Regenerate");
  again.type = "button";
  again.className = "regenerate";
  again.onclick = () => answer({ instead: last });
  views.get(last).under.append(again);
  return again;
}

// Marks the first message that is sent, if not all of them fit.
function showCut() {
  document.querySelectorAll(".cut").forEach(line => line.remove());
  if (!chat.cut) return;
  let end = 0;
  const first = chat.messages.find(message => (end += message.content.length) > chat.cut);
  if (!first) return;
  const within = end - first.content.length < chat.cut;
  const what = within ? "The messages above and a part of the next are" : "The messages above are";
  const tokens = context().toLocaleString("en");
  const line = element("p", `${what} no longer sent: they do not fit in the model's ${tokens} tokens.`);
  line.className = "cut";
  views.get(first).article.before(line);
}

function open(one) {
  if (running) running.abort();
  running = null;
  busy(false);
  chat = one;
  views = new Map();
  document.querySelectorAll(".said, .cut").forEach(said => said.remove());
  $("empty").hidden = chat.messages.length > 0;
  fail("");
  note("");
  hold();
  // Screen readers should not announce old messages as new ones.
  $("log").ariaLive = "off";
  setTimeout(() => { $("log").ariaLive = null; }, 500);
  // Offer to send an unanswered message again.
  const unanswered = chat.messages.at(-1)?.role === "user" ? chat.messages.pop() : null;
  let elements = 0;
  for (const message of chat.messages.slice().reverse()) {
    // The oldest of many are shown as they were written.
    const view = show(message, elements > 4 * ELEMENTS || undefined);
    elements += view.text.getElementsByTagName("*").length;
    $("log").prepend(view.article);
    tell(view);
  }
  showCut();
  offer();
  toEnd();
  if (unanswered) giveBack(unanswered.content, "The last message has no answer.");
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

function note(message) {
  $("notice").textContent = message;
  $("notice").hidden = !message;
}

// A text that was not sent goes back into the box, and where something else is being typed by now,
// on demand.
function giveBack(content, why) {
  fail(why);
  const put = () => {
    const box = $("prompt");
    box.value = box.value ? `${content}\n${box.value}` : content;
    typed();
  };
  if (!$("prompt").value) return put();
  const button = element("button", "Restore the message");
  button.type = "button";
  button.onclick = () => {
    put();
    fail("");
    $("prompt").focus();
  };
  $("error").append(" ", button);
}

function busy(is) {
  $("send").hidden = is;
  $("stop").hidden = !is;
}

// Where the focus goes from what is no longer there: to the message box, but on a phone that would
// open a keyboard.
function rest() {
  (matchMedia("(pointer: coarse)").matches ? $("log") : $("prompt")).focus({ preventScroll: true });
}

// --- requests

function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

const context = () => model.max_model_len ?? model.context_length;

function settings() {
  const set = {};
  for (const name of NUMBERS) {
    const value = $(name).value.trim();
    if (value !== "") set[name] = Number(value);
  }
  return set;
}

// The server's answer; else an error with its reason and code.
async function post(path, body, signal) {
  let response;
  try {
    response = await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(body), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("the server does not respond");
  }
  if (response.status === 401) askForKey();
  if (response.ok) return response;
  let told;
  try { told = (await response.json()).error; } catch { /* not from this server */ }
  const error = new Error(told?.message || `the server answered ${response.status}`);
  error.code = told?.code;
  throw error;
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

const joined = (messages, cut) => messages.map(message => message.content).join("").slice(cut);
const lengthOf = messages => messages.reduce((sum, message) => sum + message.content.length, 0);

// How many characters of the oldest messages to leave out so that some fit: whole messages of a
// conversation, which begins with the user's then; of a text, up to a word. The last message stays,
// if it is the user's.
function cutFor(messages, characters, converses) {
  const total = lengthOf(messages), last = messages.at(-1);
  const most = last.role === "user" ? total - last.content.length : total - 1;
  const least = Math.min(Math.max(0, Math.ceil(total - characters)), most);
  if (!converses) {
    const word = messages.map(message => message.content).join("").indexOf(" ", least);
    return least && word >= 0 ? Math.min(word, most) : least;
  }
  let at = 0;
  for (const message of messages) {
    if (at >= least && message.role === "user") return at;
    at += message.content.length;
  }
  return most;
}

// Asks for what follows the messages, of which the oldest are left out where the model has no room
// for them.
async function ask(one, messages, signal) {
  const set = settings();
  const system = one.converses ? $("system").value.trim() : "";
  const path = one.converses ? "/v1/chat/completions" : "/v1/completions";
  const whole = context(), total = lengthOf(messages);
  // Tokens that an answer has room for.
  const answer = Math.max(1, Math.min(set.max_tokens ?? Infinity, 256, Math.floor(whole / 4)));
  const leave = characters => {
    const cut = cutFor(messages, characters - system.length, one.converses);
    const more = cut > one.cut;
    one.cut = Math.max(one.cut, cut);
    return more;
  };
  if (one.rate) leave((whole - answer) / one.rate);
  // /v1/completions writes a few tokens where nobody says how many, and refuses too many: then it
  // tells how many the text has, which is guessed here.
  const tokens = (one.rate ? 1.05 * one.rate : 0.25) * (total - one.cut);
  let most = one.converses ? Infinity : Math.max(answer, Math.floor(whole - tokens - 4));
  for (;;) {
    const body = { model: model.id, stream: true, stream_options: { include_usage: true }, ...set };
    if (one.converses) {
      let at = 0;
      body.messages = messages.filter(message => (at += message.content.length) > one.cut || message === messages.at(-1));
      body.messages = body.messages.map(({ role, content }) => ({ role, content }));
      if (system) body.messages.unshift({ role: "system", content: system });
    } else body.prompt = joined(messages, one.cut);
    if (most < (set.max_tokens ?? Infinity)) body.max_tokens = most;
    const size = system.length + total - one.cut;
    try {
      return { response: await post(path, body, signal), size };
    } catch (error) {
      if (error.code !== "context_length_exceeded") throw error;
      const tokens = Number(/has (\d+) tokens/.exec(error.message)?.[1]);
      const left = whole - tokens;
      const fits = tokens ? 0.95 * size * (whole - answer) / tokens : size / 2;
      if (!(left >= answer) && leave(fits)) most = one.converses ? Infinity : answer;
      else if (left >= 1 && left !== most) most = left;
      else throw error;
    }
  }
}

// Writes an answer to what was sent, or replaces an existing answer. Neither changes
// unless something comes.
async function answer({ sent = null, instead = null }) {
  const one = chat, control = new AbortController(), cut = one.cut;
  const asked = instead ? one.messages.slice(0, one.messages.indexOf(instead)) : one.messages.slice();
  const message = { role: "assistant", content: "", told: "stopped" };
  const focused = document.activeElement;
  const leaves = focused === $("send") || focused.className === "regenerate";
  fail("");
  if (instead) views.get(instead).article.hidden = true;
  running = control;
  const view = show(message);
  view.text.classList.add("cursor");
  view.article.ariaBusy = "true";
  busy(true);
  if (leaves) $("stop").focus({ preventScroll: true });
  offer();
  save(one);
  toEnd();

  const begun = performance.now();
  let first = 0, usage = null, ended = "", complete = false, size = 0, failure = null;
  let arrived = false, saved = begun, timer = 0, wait = 0;
  const arrive = () => {
    arrived = true;
    if (!instead) one.messages.push(message);
    else {
      one.messages.splice(one.messages.indexOf(instead), 1, message);
      if (running === control) views.get(instead).article.remove();
    }
  };
  // The longer it takes, the more rarely.
  const redraw = () => {
    timer = 0;
    if (running !== control) return;
    const begun = performance.now(), follow = atEnd();
    view.draw(message.content);
    if (follow) toEnd();
    wait = Math.max(50, 4 * (performance.now() - begun));
  };
  try {
    const { response, size: sentSize } = await ask(one, asked, control.signal);
    size = sentSize;
    if (running === control) showCut();
    for await (const data of events(response)) {
      if (data === "[DONE]") { complete = true; break; }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      const choice = chunk.choices?.[0];
      ended = choice?.finish_reason ?? ended;
      const piece = choice && (one.converses ? choice.delta?.content : choice.text);
      if (!piece) continue;
      first ||= performance.now();
      message.content += piece;
      if (!arrived) arrive();
      timer ||= setTimeout(redraw, wait);
      if (performance.now() - saved > SAVE_EVERY) {
        save(one);
        saved = performance.now();
      }
    }
    if (!complete) throw new Error("the connection was lost");
  } catch (error) {
    failure = error.name === "AbortError" ? null : error;
  }
  clearTimeout(timer);
  if (complete && !arrived) arrive();
  if (complete) message.told = "";
  if (complete && usage) {
    const limited = ended === "length" ? ", the most that were allowed" : "";
    message.told = speed(usage.completion_tokens, begun, first) + limited;
  }
  if (failure) message.told = "interrupted";
  // In a short conversation most of it is the template's.
  if (usage && (usage.total_tokens > context() / 2 || !one.converses)) {
    one.rate = usage.total_tokens / (size + message.content.length);
  }
  // Another chat may be open by now.
  if (running !== control) return save(one);

  running = null;
  const stopFocused = document.activeElement === $("stop");
  busy(false);
  view.text.classList.remove("cursor");
  view.article.ariaBusy = "false";
  if (arrived) {
    const follow = atEnd();
    view.draw(message.content);
    tell(view);
    if (failure) fail(failure.message);
    if (follow) toEnd();
  } else {
    one.cut = cut;
    showCut();
    for (const gone of [message, sent]) {
      if (gone) views.get(gone).article.remove();
      views.delete(gone);
    }
    if (instead) views.get(instead).article.hidden = false;
    one.messages = sent ? one.messages.filter(other => other !== sent) : one.messages;
    $("empty").hidden = one.messages.length > 0;
    const why = failure ? failure.message : "stopped before the answer started";
    if (sent) giveBack(sent.content, why);
    else fail(why);
  }
  save(one);
  const again = offer();
  if (stopFocused || document.activeElement === document.body) {
    if (instead && again) again.focus({ preventScroll: true });
    else rest();
  }
}

// What came nearly all at once is measured from the question on: how long it took to arrive says
// nothing.
function speed(tokens, begun, first) {
  const now = performance.now();
  if (!first) return `${tokens} tokens`;
  const rate = tokens / ((now - (now - first < 100 ? begun : first)) / 1000);
  const told = tokens > 1 ? `${tokens} tokens` : "1 token";
  return `${told}, ${rate.toFixed(rate < 100 ? 1 : 0)} tokens/s, the first after ${(first - begun).toFixed(0)} ms`;
}

function say() {
  const content = chat.converses ? $("prompt").value.trim() : $("prompt").value;
  if (running || model === null || (chat.converses ? !content : !content && !chat.messages.length)) return;
  const sent = content ? { role: "user", content } : null;
  if (sent) {
    chat.messages.push(sent);
    show(sent);
  }
  $("prompt").value = "";
  typed();
  answer({ sent });
}

function stop() {
  if (running) running.abort();
  rest();
}

function fresh() {
  open(newChat());
  if (!$("chats").hidden) listChats();
  rest();
}

// --- settings

function typed() {
  const box = $("prompt");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
  keep("sessionStorage", "draft", box.value);
}

const PANELS = { chats: "Chats", settings: "Settings" };

function toggle(panel, open) {
  for (const [name, title] of Object.entries(PANELS)) {
    // One at a time.
    const shown = name === panel && open;
    $(name).hidden = !shown;
    const button = $(`show-${name}`);
    button.ariaExpanded = String(shown);
    button.textContent = shown ? "Close" : title;
    button.ariaLabel = shown ? `Close ${title.toLowerCase()}` : title;
  }
  if (panel === "chats" && open) listChats();
}

function askForKey() {
  $("key-label").hidden = false;
  toggle("settings", true);
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
      $("state").textContent = "enter an API key in the settings";
      askForKey();
      return;
    }
    const first = model === null;
    model = (await response.json()).data[0];
    $("model").textContent = model.id;
    document.title = `${model.id} - Fireclay`;
    const writes = model.paths.includes("/v1/completions");
    $("send").disabled = !writes;
    $("system-label").hidden = !converses();
    if (!converses() && writes) {
      $("prompt-label").textContent = "Prompt";
      $("empty").textContent = "This model completes text; it has no chat template.";
    }
    if (first) await restore();
    $("state").textContent = writes ? "ready" : "an encoder: use the API at /v1";
  } catch {
    $("state").textContent = "the server does not respond";
    setTimeout(connect, 2000);
  }
}

function theme(value) {
  if (value) document.documentElement.dataset.theme = value;
  else delete document.documentElement.dataset.theme;
}

$("say").onsubmit = event => { event.preventDefault(); say(); };
$("prompt").oninput = typed;
$("prompt").onkeydown = event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); say(); }
};
document.onkeydown = event => {
  if (event.key !== "Escape") return;
  const panel = Object.keys(PANELS).find(name => !$(name).hidden);
  if (running) stop();
  else if (panel) { toggle(panel, false); $(`show-${panel}`).focus(); }
};
$("stop").onclick = stop;
$("new").onclick = fresh;
for (const name of Object.keys(PANELS)) $(`show-${name}`).onclick = () => toggle(name, $(name).hidden);
$("delete-all").onclick = () => {
  if (!confirm("Delete all chats saved in this browser?")) return;
  forget(names());
  $("new").focus();
};
// Before the page is left or loaded again, and when another tab changed what is kept.
window.onpagehide = () => { if (running) save(chat); };
window.onstorage = () => { if (!$("chats").hidden) listChats(); };
$("key").onchange = () => { keep("sessionStorage", "key", $("key").value.trim()); connect(); };
$("system").onchange = () => keep("localStorage", "system", $("system").value);
$("theme").onchange = () => { keep("localStorage", "theme", $("theme").value); theme($("theme").value); };
$("key").value = kept("sessionStorage", "key");
$("system").value = kept("localStorage", "system");
$("theme").value = kept("localStorage", "theme");
theme($("theme").value);
$("prompt").value = kept("sessionStorage", "draft");
typed();
$("prompt").focus();
connect();
