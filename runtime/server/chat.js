// Conversations without their page: what is kept, what is sent, and what an answer brings.
// A turn is {question, spans, stats, note, error}; a span is [text, number of its draft, kind].

const KEPT = "mtpbuild.chat.";
const FULL = 0.75; // of the context: what a question may take, to leave room for its answer
const HALF = 0.5; // what is left if turns are dropped, so that it does not happen each time

export function newConversation() {
  const id = Date.now().toString(36) + Math.random().toString(36).slice(2, 8);
  return { id, changed: 0, system: "", turns: [], first: 0 }; // first: the oldest turn that is sent
}

export function textOf(turn, kind = "content") {
  return turn.spans.filter((span) => span[2] === kind).map((span) => span[0]).join("");
}

export function titleOf({ turns }) {
  return turns.length ? turns[0].question.trim().split("\n")[0].slice(0, 60) : "New chat";
}

// The messages up to the last question. A turn without an answer is not sent again.
export function messagesOf({ system, turns, first }) {
  const sent = system.trim() ? [{ role: "system", content: system }] : [];
  turns.slice(first).forEach((turn, at, rest) => {
    const last = at === rest.length - 1, content = textOf(turn);
    if (last || content.trim()) sent.push({ role: "user", content: turn.question });
    if (!last && content.trim()) sent.push({ role: "assistant", content });
  });
  return sent;
}

// Ask a question in place of turn `at` and those after it.
export function ask(conversation, question, at = conversation.turns.length) {
  conversation.turns.length = at;
  if (conversation.first >= at) conversation.first = 0;
  conversation.turns.push({ question, spans: [], stats: null, note: "", error: "" });
}

// Answer the last question. call(path, body, signal) fetches; changed() shows what has come.
export async function answer(call, conversation, settings, signal, changed) {
  const turn = conversation.turns.at(-1), { first } = conversation;
  try {
    await dropOldest(call, conversation, settings.model, signal);
    changed();
    const wanted = { stream: true, stream_options: { include_usage: true }, return_token_ids: true };
    const body = { ...settings, messages: messagesOf(conversation), ...wanted };
    const response = await call("v1/chat/completions", body, signal);
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of eventsOf(response)) {
      if (event.error) throw new Error(event.error.message);
      take(turn, event, performance.now() / 1000);
      changed();
    }
    if (!textOf(turn).trim()) turn.note ||= "the answer is empty";
  } catch (error) {
    if (signal.aborted) turn.note = "stopped";
    else turn.error = error instanceof TypeError ? `no answer from the server (${error.message})` : error.message;
  }
  if (!textOf(turn).trim()) conversation.first = first; // the next question may have room for them
  conversation.changed = Date.now();
}

// Leave out the oldest turns if the context is too small for them and an answer.
async function dropOldest(call, conversation, model, signal) {
  for (let share = FULL; conversation.first < conversation.turns.length - 1; share = HALF) {
    const response = await call("tokenize", { model, messages: messagesOf(conversation) }, signal);
    const told = await response.json();
    const long = response.ok ? told.count > share * told.max_model_len : told.error.code === "context_length_exceeded";
    if (!long) return;
    conversation.first += 1;
  }
}

// Add a step's event to a turn: its texts, and what is known of its speed.
export function take(turn, event, now) {
  const stats = (turn.stats ??= { tokens: 0, steps: 0, prompt: 0, length: 0, speed: 0, began: 0 });
  for (const choice of event.choices) {
    const ids = choice.token_ids || [];
    let draft = 0;
    for (const [text, accepted, kind] of choice.spans || []) {
      draft += 1;
      if (text) turn.spans.push([text, accepted ? draft : 0, kind]);
    }
    if (ids.length) {
      stats.tokens += ids.length;
      stats.steps += 1;
      stats.length = stats.tokens / stats.steps;
      stats.speed = stats.tokens / Math.max(now - (stats.began ||= now), 0.001);
    }
    if (choice.finish_reason === "length") turn.note = "cut off: the context is full";
  }
  if (event.usage) stats.prompt = event.usage.prompt_tokens;
  if (event.metrics) {
    stats.length = event.metrics.speculative_decoding.mean_acceptance_length || stats.length;
    stats.speed = event.metrics.tokens_per_second || stats.speed;
  }
}

export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the connection ended before the answer did");
    held += value;
    const lines = held.split("\n");
    held = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
    }
  }
}

// Return a function that finds the spans of rendered text: it cuts each next piece of the text
// into [text, span]. Rendering leaves marks out, so words are looked up one after the other.
export function makeCutter(spans) {
  const source = spans.map((span) => span[0]).join("");
  let at = 0, index = 0, end = spans.length ? spans[0][0].length : 0;
  return (text) => {
    const pieces = [];
    const add = (part) => {
      const last = pieces.at(-1);
      if (last && last[1] === spans[index]) last[0] += part;
      else pieces.push([part, spans[index]]);
    };
    for (const word of text.match(/\s+|\S+/g) || []) {
      const found = word.trim() ? source.indexOf(word, at) : source.startsWith(word, at) ? at : -1;
      if (found < 0) {
        add(word);
        continue;
      }
      for (at = found; at < found + word.length; ) {
        while (at >= end) end += spans[++index][0].length;
        const next = Math.min(found + word.length, end);
        add(source.slice(at, next));
        at = next;
      }
    }
    return pieces;
  };
}

// The conversations that a browser keeps, newest first; storage: localStorage.
export function load(storage) {
  const found = [];
  for (let at = 0; at < storage.length; at += 1) {
    const key = storage.key(at);
    if (!key.startsWith(KEPT)) continue;
    try {
      found.push({ ...newConversation(), ...JSON.parse(storage.getItem(key)) });
    } catch {
      // not written by this page
    }
  }
  return found.sort((one, other) => other.changed - one.changed);
}

// Keep a conversation; returns false if the browser has no room for it.
export function save(storage, conversation) {
  try {
    storage.setItem(KEPT + conversation.id, JSON.stringify(conversation));
    return true;
  } catch {
    return false;
  }
}

export function forget(storage, conversation) {
  storage.removeItem(KEPT + conversation.id);
}
