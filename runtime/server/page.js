// The page: it draws the conversations of chat.js, and does what is clicked.
import { answer, ask, forget, load, makeCutter, newConversation, save, textOf, titleOf } from "./chat.js";

const $ = (id) => document.getElementById(id);
const pause = (ms) => new Promise((go) => setTimeout(go, ms));
let current = newConversation();
let views = []; // of the current conversation's turns
let running = null; // what stops the answer that is under way
let editing = null; // number of the turn that the next question replaces
let models = [];
let declined = false; // whether the user gave no key when asked

function make(tag, kind = "", text = "") {
  const made = document.createElement(tag);
  made.className = kind;
  made.textContent = text;
  return made;
}

function makeButton(text, title, clicked) {
  const made = make("button", "", text);
  made.type = "button";
  made.title = title;
  made.addEventListener("click", () => clicked(made));
  return made;
}

async function call(path, body, signal) {
  for (;;) {
    const key = sessionStorage.getItem("key");
    const headers = { "Content-Type": "application/json", ...(key ? { Authorization: "Bearer " + key } : {}) };
    const method = body ? "POST" : "GET";
    const response = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body) });
    if (response.status !== 401 || declined) return response;
    if (sessionStorage.getItem("key") !== key) continue; // another call has asked meanwhile
    const given = prompt("This server needs an API key");
    declined = !given;
    if (given) sessionStorage.setItem("key", given);
  }
}

async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // without TLS there is no clipboard
    const area = make("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  const said = button.textContent;
  button.textContent = "Copied";
  await pause(1200);
  button.textContent = said;
}

// A token's text, shaded by the draft that it was accepted from.
function makeToken([text, draft], most) {
  if (!draft) return document.createTextNode(text);
  const made = make("span", "draft", text);
  made.style.setProperty("--at", most > 1 ? (draft - 1) / (most - 1) : 1);
  made.title = "draft " + draft;
  return made;
}

const mostDrafts = (spans) => spans.reduce((most, span) => Math.max(most, span[1]), 0);

function shade(place, spans) {
  const cut = makeCutter(spans), most = mostDrafts(spans);
  const walker = document.createTreeWalker(place, NodeFilter.SHOW_TEXT), texts = [];
  while (walker.nextNode()) texts.push(walker.currentNode);
  for (const node of texts) {
    if (node.data.trim()) node.replaceWith(...cut(node.data).map(([text, span]) => makeToken([text, span?.[1]], most)));
  }
}

function addCopyButtons(place) {
  for (const block of place.querySelectorAll("pre")) {
    const code = block.textContent;
    block.append(makeButton("Copy", "Copy this block", (button) => copy(code, button)));
  }
}

function viewAnswer(turn) {
  const place = make("article", "answer"), thought = make("details"), content = make("div", "content");
  const summary = make("summary"), thinking = make("div"), note = make("p", "note"), error = make("p", "error");
  error.setAttribute("role", "alert");
  thought.append(summary, thinking);
  place.append(thought, content, note, error);
  let drawn = "", seen = 0, folded = false, running = false, drawing = false, timer = 0, ready = 0;

  async function drawContent() {
    const text = textOf(turn), began = performance.now();
    if (drawing || text === drawn) return;
    drawing = true;
    const spans = turn.spans.filter((span) => span[2] === "content");
    const told = call("markdown", { text }).then((response) => (response.ok ? response.json() : {}));
    const { html } = await told.catch(() => ({}));
    keepingPlace(() => {
      content.classList.toggle("plain", html === undefined);
      if (html === undefined) content.textContent = text.trim();
      else content.innerHTML = html; // the server escapes all of the text's own HTML
      shade(content, spans);
      addCopyButtons(content);
    });
    drawing = false;
    drawn = text;
    ready = performance.now() + Math.max(60, 10 * (performance.now() - began)); // a tenth of the time
    drawSoon();
  }

  function drawSoon() {
    clearTimeout(timer);
    timer = setTimeout(drawContent, running ? Math.max(0, ready - performance.now()) : 0);
  }

  function update(live) {
    const reasoning = turn.spans.filter((span) => span[2] === "reasoning"), text = textOf(turn);
    thought.hidden = !reasoning.length;
    const most = mostDrafts(reasoning);
    thinking.append(...reasoning.slice(seen).map((span) => makeToken(span, most)));
    seen = reasoning.length;
    const over = !live || text.trim();
    if (!folded) thought.open = !over;
    folded ||= Boolean(over);
    summary.textContent = over ? `Thought (${seen} tokens)` : "Thinking …";
    thinking.scrollTop = thinking.scrollHeight;
    content.classList.toggle("waiting", Boolean(live && !text.trim() && !seen));
    note.hidden = !(note.textContent = turn.note);
    error.hidden = !(error.textContent = turn.error);
    running = live;
    drawSoon();
  }
  return { place, update };
}

function viewTurn(turn, at) {
  const question = make("div", "question"), tools = make("div", "tools"), told = make("span");
  const asking = make("div", "tools"), shown = viewAnswer(turn);
  asking.append(
    makeButton("Copy", "Copy the question", (button) => copy(turn.question, button)),
    makeButton("Edit", "Change the question and ask again", () => edit(at)),
  );
  question.append(make("p", "", turn.question), asking);
  const copying = makeButton("Copy", "Copy the answer as markdown", (button) => copy(textOf(turn).trim(), button));
  const again = makeButton("Regenerate", "Answer the last question again", () => send(turn.question, at));
  tools.append(copying, again, told);
  shown.place.append(tools);
  function update() {
    const live = running !== null && at === current.turns.length - 1;
    shown.update(live);
    const { tokens, length, speed } = turn.stats || {};
    told.textContent = tokens ? `${tokens} tokens · ${length.toFixed(2)} tokens/step · ${speed.toFixed(0)} tokens/s` : "";
    copying.hidden = live || !textOf(turn).trim();
    again.hidden = live || at !== current.turns.length - 1;
    for (const node of [question, shown.place]) {
      node.classList.toggle("unseen", at < current.first);
      node.classList.toggle("replaced", editing !== null && at >= editing);
    }
    cut.hidden = !at || at !== current.first;
  }
  const cut = make("p", "cut", "The context is full: the model no longer sees what is above.");
  return { nodes: [cut, question, shown.place], update };
}

function update() {
  views.forEach((view) => view.update());
  document.body.dataset.state = running ? "answering" : "idle";
  $("send").textContent = running ? "Stop" : "Send";
  $("editing").hidden = editing === null;
  $("prompt-start").textContent = current.system ? "– " + current.system.slice(0, 80) : "";
  const stats = current.turns.at(-1)?.stats, most = models.find(({ id }) => id === chosenModel())?.max_model_len;
  const used = stats ? stats.prompt + stats.tokens : 0;
  $("context").textContent = used && most ? `context ${used.toLocaleString("en")} of ${most.toLocaleString("en")}` : "";
}

// Change what is shown; who reads the end stays at the end.
function keepingPlace(change) {
  const place = $("scroll"), atEnd = place.scrollHeight - place.scrollTop - place.clientHeight < 60;
  change();
  if (atEnd) place.scrollTop = place.scrollHeight;
}

// Draw the conversation; the turns before `from` stay as they are.
function draw(from = 0) {
  views = current.turns.map((turn, at) => (at < from ? views[at] : viewTurn(turn, at)));
  $("turns").replaceChildren(...views.flatMap((view) => view.nodes));
  $("system").value = current.system;
  update();
  $("scroll").scrollTop = $("scroll").scrollHeight;
  drawList();
}

function drawList() {
  const rows = load(localStorage).map((kept) => {
    const row = make("div", kept.id === current.id ? "current" : "");
    row.append(
      makeButton(titleOf(kept), titleOf(kept), () => open(kept)),
      makeButton("×", "Delete this conversation", () => remove(kept)),
    );
    return row;
  });
  $("chats").replaceChildren(...rows);
}

function keep() {
  if (!current.turns.length) return;
  const kept = save(localStorage, current);
  $("notice").hidden = kept;
  $("notice").textContent = kept ? "" : "The browser's storage is full: this conversation is not kept. Delete old ones.";
}

function open(conversation) {
  stop();
  current = conversation;
  sessionStorage.setItem("chat", current.id);
  if (editing !== null) edit(null);
  draw();
  document.body.classList.remove("menu");
}

function remove(conversation) {
  if (!confirm(`Delete “${titleOf(conversation)}”?`)) return;
  if (conversation.id === current.id) open(newConversation());
  forget(localStorage, conversation);
  drawList();
}

function edit(at) {
  if (at !== null) stop();
  if (at !== null || editing !== null) $("text").value = at === null ? "" : current.turns[at].question;
  editing = at;
  update();
  $("text").focus();
}

// End the answer that is under way, whose beginning is kept.
function stop() {
  if (!running) return;
  running.abort();
  running = null;
  current.turns.at(-1).note = "stopped";
  keep();
}

const chosenModel = () => (models.length > 1 ? $("model").value : models[0]?.id);

async function send(question, at) {
  stop();
  declined = false;
  const conversation = current, mine = (running = new AbortController());
  ask(conversation, question, at);
  editing = null;
  conversation.changed = Date.now();
  keep();
  draw(at);
  const settings = { model: models.length > 1 ? chosenModel() : undefined };
  if ($("temperature").value !== "") settings.temperature = Number($("temperature").value);
  let first = true;
  await answer(call, conversation, settings, mine.signal, () => {
    if (running !== mine) return;
    keepingPlace(first ? update : views.at(-1).update);
    first = false;
  });
  if (running !== mine) return;
  running = null;
  keepingPlace(update);
  keep();
  drawList();
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("text").value;
  if (running) return running.abort();
  if (!text.trim()) return;
  $("text").value = "";
  send(text, editing ?? current.turns.length);
});
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Escape" && editing !== null) edit(null);
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!running) $("ask").requestSubmit();
});
$("system").addEventListener("input", () => {
  current.system = $("system").value;
  update();
  keep();
});
$("shade").addEventListener("change", () => document.body.classList.toggle("plain-text", !$("shade").checked));
$("model").addEventListener("change", update);
$("cancel").addEventListener("click", () => edit(null));
$("new").addEventListener("click", () => {
  open(newConversation());
  $("text").focus();
});
$("menu").addEventListener("click", () => {
  $("menu").setAttribute("aria-expanded", document.body.classList.toggle("menu"));
});
document.querySelector("main").addEventListener("click", (event) => {
  if (!event.target.closest("#menu")) document.body.classList.remove("menu");
});
addEventListener("pagehide", keep);
addEventListener("storage", drawList);

async function start() {
  const response = await call("v1/models").catch(() => null);
  if (response?.ok) models = (await response.json()).data;
  if (models.length === 1) $("name").textContent = models[0].id;
  $("model").hidden = models.length < 2;
  $("model").replaceChildren(...models.map(({ id }) => new Option(id, id)));
  open(load(localStorage).find(({ id }) => id === sessionStorage.getItem("chat")) || current);
}
start();
