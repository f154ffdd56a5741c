// Runs the server's page without a browser: node page_dom.mjs FOLDER URL KEY SCENARIO
// FOLDER has page.js and chat.js, KEY is what the user gives who is asked for a key. SCENARIO is the
// body of an async function that gets what stands in `user`; what it returns is printed as JSON.
import { pathToFileURL } from "node:url";

class Node {
  children = [];
  get textContent() {
    return this.children.map((child) => child.textContent).join("");
  }
}

class Text extends Node {
  constructor(data) {
    super();
    this.data = data;
  }
  get textContent() {
    return this.data;
  }
}

class Element extends Node {
  constructor(tag) {
    super();
    Object.assign(this, { tag, dataset: {}, hidden: false, open: false, value: "", checked: true });
    Object.assign(this, { listeners: {}, attributes: {}, html: null, style: { setProperty() {} } });
    Object.assign(this, { scrollHeight: 0, scrollTop: 0, clientHeight: 0 });
    const names = (this.names = new Set());
    this.classList = {
      add: (name) => names.add(name),
      remove: (name) => names.delete(name),
      contains: (name) => names.has(name),
      toggle(name, on = !names.has(name)) {
        names[on ? "add" : "delete"](name);
        return on;
      },
    };
  }
  get className() {
    return [...this.names].join(" ");
  }
  set className(text) {
    this.names.clear();
    text.split(" ").filter(Boolean).forEach((name) => this.names.add(name));
  }
  get textContent() {
    return super.textContent;
  }
  set textContent(text) {
    this.replaceChildren(...(text ? [text] : []));
  }
  set innerHTML(html) {
    this.replaceChildren();
    this.html = html;
  }
  append(...made) {
    this.children.push(...made.map((each) => (typeof each === "string" ? new Text(each) : each)));
  }
  replaceChildren(...made) {
    this.children = [];
    this.html = null;
    this.append(...made);
  }
  querySelectorAll() {
    return []; // the scenarios look at the server's HTML as it is
  }
  setAttribute(name, value) {
    this.attributes[name] = value;
  }
  addEventListener(name, heard) {
    this.listeners[name] = heard;
  }
  focus() {}
  requestSubmit() {
    this.listeners.submit({ preventDefault() {} });
  }
  click() {
    this.listeners.click({ target: this });
  }
  *all() {
    for (const child of this.children) {
      yield child;
      if (child.all) yield* child.all();
    }
  }
}

class Storage {
  kept = new Map();
  room = Infinity;
  get length() {
    return this.kept.size;
  }
  key = (at) => [...this.kept.keys()][at];
  getItem = (name) => this.kept.get(name) ?? null;
  removeItem = (name) => this.kept.delete(name);
  setItem(name, value) {
    if (value.length > this.room) throw new Error("QuotaExceededError");
    this.kept.set(name, value);
  }
}

const [folder, url, key, scenario] = process.argv.slice(2);
const told = { sent: [], asked: [] }; // bodies of chats, and what dialogs have said
let elements, leave, reloads = 0;
const $ = (id) => elements.get(id) || elements.set(id, new Element(id)).get(id);
const browser = {
  document: {
    getElementById: $,
    querySelector: $,
    createElement: (tag) => new Element(tag),
    createTextNode: (text) => new Text(text),
    createTreeWalker: () => ({ nextNode: () => null }),
    get body() {
      return $("body");
    },
  },
  NodeFilter: { SHOW_TEXT: 4 },
  Option: class extends Element {},
  localStorage: new Storage(),
  sessionStorage: new Storage(),
  prompt: (text) => (told.asked.push(text), key),
  confirm: (text) => (told.asked.push(text), true),
  addEventListener: (name, heard) => name === "pagehide" && (leave = heard),
};
Object.assign(globalThis, browser);
const calls = new Set(); // under way
const overNetwork = globalThis.fetch;
globalThis.fetch = (path, options) => {
  if (path === "v1/chat/completions") told.sent.push(JSON.parse(options.body));
  const made = overNetwork(`${url}/${path}`, options).finally(() => calls.delete(made));
  calls.add(made);
  return made;
};

const user = {
  $,
  ...told,
  localStorage: browser.localStorage,
  chat: await import(pathToFileURL(`${folder}/chat.js`)),
  async until(condition) {
    for (let turns = 0; !condition(); turns += 1) {
      if (turns > 2000) throw new Error(`never: ${condition}`);
      await new Promise((go) => setTimeout(go, 5));
    }
  },
  async open() {
    leave?.();
    elements = new Map();
    await import(pathToFileURL(`${folder}/page.js`) + `?${(reloads += 1)}`);
    await user.idle();
  },
  // Until the answer has ended and all markdown is drawn.
  async idle() {
    let quiet = 0;
    await user.until(() => {
      quiet = $("body").dataset.state === "idle" && !calls.size ? quiet + 1 : 0;
      return quiet > 5;
    });
  },
  begin(text) {
    $("text").value = text;
    $("ask").requestSubmit();
  },
  async say(text) {
    user.begin(text);
    await user.idle();
    return user.turns().at(-1);
  },
  async click(text) {
    const all = [...$("turns").all(), ...$("chats").all()];
    all.filter((each) => each.tag === "button" && !each.hidden && each.textContent === text).at(-1).click();
    await user.idle();
  },
  // What stands in the chat: each question with its answer's parts, if they are shown.
  turns() {
    const found = [];
    for (const node of $("turns").children) {
      if (node.hidden) continue;
      if (node.names.has("cut")) found.push({ cut: node.textContent });
      if (node.names.has("question")) found.push({ question: node.children[0].textContent });
      if (!node.names.has("answer")) continue;
      const [thought, content, note, error] = node.children;
      const parts = { thought, note, error };
      const shown = Object.entries(parts).filter(([, part]) => !part.hidden);
      Object.assign(found.at(-1), Object.fromEntries(shown.map(([name, part]) => [name, part.textContent])));
      Object.assign(found.at(-1), { html: content.html, open: thought.open });
    }
    return found;
  },
};
await user.open();
const AsyncFunction = (async () => {}).constructor;
const result = await new AsyncFunction(...Object.keys(user), scenario)(...Object.values(user));
process.stdout.write(JSON.stringify(result), () => process.exit());
