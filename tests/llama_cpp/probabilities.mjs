// What llama.cpp makes of a GGUF file: for each token of a sequence the probabilities of the next one.
//
//     npm install node-llama-cpp                         (in any folder, from which this is run)
//     node probabilities.mjs MODEL.gguf REQUEST.json OUT.f32
//
// REQUEST has `text`, and `tokens` to compute with. OUT gets tokens x vocabulary floats, and standard output a line of JSON
// with the ids that llama.cpp's own tokenizer has for the text.

import {createRequire} from "node:module";
import {readFileSync, writeFileSync} from "node:fs";
import {pathToFileURL} from "node:url";

// The package is where this is run, and not next to this file.
const entry = createRequire(process.cwd() + "/").resolve("node-llama-cpp");
const {getLlama} = await import(pathToFileURL(entry));
const [path, request, out] = process.argv.slice(2);
const {text, tokens} = JSON.parse(readFileSync(request, "utf8"));
const llama = await getLlama({gpu: false, build: "never", logLevel: "error"});
const model = await llama.loadModel({modelPath: path});
const size = Math.max(tokens.length + 1, 64);
const context = await model.createContext({contextSize: size, batchSize: size, flashAttention: false});
const asked = tokens.map(token => [token, {generateNext: {probabilities: true}}]);
const answers = await context.getSequence().controlledEvaluate(asked);
const vocabulary = answers[0].next.probabilities.size;
const all = new Float32Array(tokens.length * vocabulary);
answers.forEach((answer, at) => {
    for (const [token, probability] of answer.next.probabilities) all[at * vocabulary + token] = probability;
});
writeFileSync(out, Buffer.from(all.buffer));
console.log(JSON.stringify({vocabulary, tokens: Array.from(model.tokenize(text, false))}));
process.exit(0);
