// Runs the server's page without a browser: node page_dom.mjs PAGE URL KEY QUESTION...
// It asks the questions one after the other, and prints what stands in the chat and what was sent.
import { readFileSync } from "node:fs";

class Element {
  constructor(tag) {
    Object.assign(this, { tag, children: [], className: "", open: false, value: "", listeners: {} });
    this.dataset = {};
    this.style = { setProperty() {} };
    this.classList = { toggle() {} };
    this.said = "";
  }
  get textContent() {
    return this.said + this.children.map((child) => child.textContent).join("");
  }
  set textContent(text) {
    this.replaceChildren();
    this.said = text;
  }
  get firstChild() {
    return this.children[0];
  }
  append(...made) {
    this.children.push(...made);
  }
  prepend(...made) {
    this.children.unshift(...made);
  }
  replaceChildren() {
    this.children = [];
  }
  querySelector(selector) {
    const tag = { details: "details", ":scope > span": "span" }[selector];
    return this.children.find((child) => child.tag === tag) || null;
  }
  addEventListener(name, heard) {
    this.listeners[name] = heard;
  }
}

const [page, url, key, ...questions] = process.argv.slice(2);
const script = readFileSync(page, "utf-8").match(/<script>([\s\S]*)<\/script>/)[1];
const known = new Map();
const element = (id) => known.get(id) || known.set(id, new Element(id)).get(id);
const stored = new Map(), sent = [], body = new Element("body");
const browser = {
  document: { getElementById: element, createElement: (tag) => new Element(tag), body },
  sessionStorage: { getItem: (name) => stored.get(name), setItem: (name, value) => stored.set(name, value) },
  prompt: () => key,
  scrollTo() {},
  fetch(path, options) {
    if (options.body) sent.push(JSON.parse(options.body).messages);
    return fetch(url + path, options);
  },
};
element("temperature").value = "0"; // the engine is asked for the same
new Function(...Object.keys(browser), script)(...Object.values(browser));
for (const [number, question] of questions.entries()) {
  element("text").value = question;
  element("ask").listeners.submit({ preventDefault() {} });
  while (Number(body.dataset.answered) !== number + 1) await new Promise((go) => setTimeout(go, 5));
}
const seen = element("chat").children.map((bubble) => {
  const thought = bubble.querySelector("details");
  return {
    kind: bubble.className,
    text: bubble.said + bubble.children.filter((child) => child.tag === "span").map((child) => child.textContent).join(""),
    thought: thought && { open: thought.open, text: thought.textContent },
  };
});
console.log(JSON.stringify({ seen, sent }));
