// Generates tokens by an engine of mtpbuild, with Node's binding of onnxruntime:
//
//     npm install --ignore-scripts
//     node generate.mjs ENGINE COUNT TOKEN...
//
// The binding can't register a library of operators, so ENGINE is the folder of an engine that was
// built with --portable. The numbers after COUNT are the prompt's tokens. The steps are those of
// docs/engine-format.md, "Calling the programs", for one request in slot 0.
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import ort from 'onnxruntime-node';

const ARRAYS = { int64: BigInt64Array, int32: Int32Array, float32: Float32Array, bool: Uint8Array };
const PART = 128; // caches are bound in parts of 128 rows

const [folder, count, ...words] = process.argv.slice(2);
const prompt = words.map(BigInt);
const manifest = JSON.parse(readFileSync(join(folder, 'engine.json'), 'utf8'));
const { build, lookahead, model, programs, state } = manifest;
if (build.cpu_layout !== null) fail(`${folder}: its operators are mtpbuild's; build it with --portable`);
if (prompt.length + Number(count) > build.max_seq_len) fail('the prompt is too long');

function fail(why) {
  console.error(`error: ${why}`);
  process.exit(1);
}

const product = (sizes) => sizes.reduce((all, size) => all * size, 1);
const zeros = (dtype, sizes) => new ARRAYS[dtype](product(sizes));
const tensor = (dtype, array, sizes) => new ort.Tensor(dtype, array, sizes);

// A buffer for each state, and a second one for those that are not written in place.
const sizes = Object.fromEntries(state.map((s) => [s.name, [1, ...Object.values(s.sizes).slice(1)]]));
const states = Object.fromEntries(state.map((s) => [s.name, zeros(s.dtype, sizes[s.name])]));
const next = Object.fromEntries(state.map((s) => [s.name, zeros(s.dtype, sizes[s.name])]));
const isCache = Object.fromEntries(state.map((s) => [s.name, s.role === 'rows']));

async function load(name) {
  const session = await ort.InferenceSession.create(join(folder, programs[name].file));
  return { session, ...programs[name] };
}

// Runs a program with the caches' first rows; returns what it says of no state.
async function run({ session, inputs, outputs }, given, rows) {
  const feeds = {};
  const fetches = {};
  for (const { name, dtype } of inputs) {
    if (!(name in states)) {
      feeds[name] = given[name];
    } else if (isCache[name]) {
      const bound = sizes[name].with(2, rows);
      feeds[name] = tensor(dtype, states[name].subarray(0, product(bound)), bound);
    } else {
      feeds[name] = tensor(dtype, states[name], sizes[name]);
    }
  }
  for (const { name, dtype } of outputs) {
    const own = name.replace(/\.out$/, '');
    if (!(own in states)) fetches[name] = null;
    else fetches[name] = isCache[own] ? feeds[own] : tensor(dtype, next[own], sizes[own]);
  }
  const results = await session.run(feeds, fetches);
  for (const { name } of outputs) {
    const own = name.replace(/\.out$/, '');
    if (own in states && !isCache[own]) [states[own], next[own]] = [next[own], states[own]];
  }
  return results;
}

const [prefill, decode] = [await load('prefill'), await load('decode')];

// The prompt but for its last token.
const last = prompt.length - 1;
for (let start = 0; start < last; start += build.prefill_chunk) {
  const end = Math.min(start + build.prefill_chunk, last);
  const ahead = Array.from({ length: lookahead }, (_, i) => prompt[end + i] ?? 0n);
  const given = {
    tokens: tensor('int64', BigInt64Array.from(prompt.slice(start, end)), [1, end - start]),
    start: tensor('int64', BigInt64Array.of(BigInt(start)), [1]),
    ahead: tensor('int64', BigInt64Array.from(ahead), [1, lookahead]),
  };
  await run(prefill, given, build.capacity);
}

// The first step's newest token is the prompt's last one.
states.lengths[0] = BigInt(last);
states.window[0] = prompt[last];
const active = tensor('bool', Uint8Array.of(1), [1]);
const eos = new Set(model.eos_token_ids);
const emitted = [];
let steps = 0;
while (emitted.length < count && !eos.has(emitted.at(-1))) {
  const used = Number(states.lengths[0]) + states.window.length;
  const rows = Math.min(Math.ceil(used / PART) * PART, build.capacity);
  const { tokens, num_tokens: number } = await run(decode, { active }, rows);
  for (let i = 0; i < number.data[0] && emitted.length < count; i++) {
    emitted.push(Number(tokens.data[i]));
    if (eos.has(emitted.at(-1))) break;
  }
  steps += 1;
}
console.log(emitted.join('\n'));
console.error(`${emitted.length} tokens in ${steps} steps`);
