// Compares generation on the CPU with llama.cpp: the same GGUF file, in turn, as many threads each.
//
//     npm install node-llama-cpp
//     node benches/llama_cpp.mjs FIRECLAY MODEL.gguf.. [--repeats N] [--threads N] [--tokens N] [--prompt N] [--json]
//
// The package brings llama.cpp's own libraries. Models of `benches/gguf_files.py` have a token for each byte. A line for each file: median
// tokens a second behind a short prompt, and of a prompt of 512 tokens, ours and theirs, and the ratio, above 1 where ours is faster.
// NODE_LLAMA_CPP names the package where it is not next to this file.

import { execFileSync } from "node:child_process";
import { parseArgs } from "node:util";

const { values: options, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    repeats: { type: "string", default: "3" },
    threads: { type: "string", default: "2" },
    tokens: { type: "string", default: "64" },
    prompt: { type: "string", default: "512" },
    json: { type: "boolean", default: false },
  },
});
const [program, ...models] = positionals;
if (!models.length) {
  console.error("usage: node benches/llama_cpp.mjs FIRECLAY MODEL.gguf..");
  process.exit(2);
}
const [repeats, threads, tokens, length] = ["repeats", "threads", "tokens", "prompt"].map((name) => Number(options[name]));
const { getLlama, LlamaLogLevel } = await import(process.env.NODE_LLAMA_CPP ?? "node-llama-cpp");
const llama = await getLlama({ gpu: false, build: "never", maxThreads: threads, logLevel: LlamaLogLevel.error });

const text = (count) => "Fireclay bricks keep the heat of the kiln. ".repeat(count).slice(0, count);
const median = (numbers) => numbers.toSorted((a, b) => a - b)[Math.floor(numbers.length / 2)];

/** Tokens a second of a prompt, and behind a short one, by llama.cpp. */
async function theirs(model) {
  const context = await model.createContext({ contextSize: length + tokens + 64, batchSize: 512, threads, flashAttention: false });
  const sequence = context.getSequence();
  const prompt = model.tokenize(text(length));
  if (prompt.length !== length) throw new Error(`${prompt.length} tokens, and not ${length}`);
  let begun = performance.now();
  await sequence.evaluateWithoutGeneratingNewTokens(prompt);
  const read = length / (performance.now() - begun) * 1000;
  await sequence.clearHistory();
  let count = -1;
  for await (const _ of sequence.evaluate(model.tokenize(text(8)), { temperature: 0, yieldEogToken: true })) {
    // The first is behind the prompt.
    if (++count === 0) begun = performance.now();
    if (count === tokens) break;
  }
  const written = count / (performance.now() - begun) * 1000;
  await context.dispose();
  return { read, written };
}

/** The same by this program. */
function ours(path) {
  const run = (prompt, count) => {
    const args = ["generate", "--backend", "cpu", "--json", "--temperature", "0", "--model", path, "--prompt", prompt];
    const env = { ...process.env, RAYON_NUM_THREADS: String(threads) };
    const lines = execFileSync(program, [...args, "--max-tokens", String(count)], { encoding: "utf8", env }).trim().split("\n");
    return JSON.parse(lines.at(-1));
  };
  const prompt = run(text(length), 1);
  if (prompt.prompt_tokens !== length) throw new Error(`${prompt.prompt_tokens} tokens, and not ${length}`);
  const written = run(text(8), tokens + 1);
  if (written.tokens.length !== tokens + 1) throw new Error(`${written.tokens.length} tokens, and not ${tokens + 1}`);
  return { read: length / prompt.prefill_seconds, written: written.decode_tokens_per_second };
}

for (const path of models) {
  const model = await llama.loadModel({ modelPath: path, gpuLayers: 0 });
  await theirs(model);
  const all = { ours: [], theirs: [] };
  for (let repeat = 0; repeat < repeats; repeat++) {
    all.ours.push(ours(path));
    all.theirs.push(await theirs(model));
  }
  await model.dispose();
  for (const [what, key] of [["decode", "written"], [`prompt of ${length}`, "read"]]) {
    const [own, their] = [all.ours, all.theirs].map((runs) => median(runs.map((run) => run[key])));
    const line = { model: path.split("/").at(-1), what, ours: own, theirs: their, ratio: own / their };
    const shown = [own, their].map((speed) => speed.toFixed(1));
    console.log(options.json ? JSON.stringify(line) : `${line.model}  ${what}: ${shown[0]} tokens/s, llama.cpp ${shown[1]}: ${line.ratio.toFixed(2)}`);
  }
}
process.exit(0);
