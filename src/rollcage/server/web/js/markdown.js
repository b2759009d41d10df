// Markdown and code as they are meant. The libraries tell what a text is made of; the page draws it, element by element.
// No HTML is read anywhere: what a text has of it is shown as text, pictures are links, links lead to web pages only.
import { html, useMemo } from "../vendor/preact.js";
import { highlight, lexer } from "../vendor/markdown.js";

/** Longer texts are shown as they are: nobody knows how long a foreign parser takes over a hostile one. */
const MOST = 60_000;
const MOST_CODE = 40_000;
const DEEPEST = 40;

const LANGUAGES = {
  py: "python", js: "javascript", mjs: "javascript", cjs: "javascript", jsx: "javascript", ts: "typescript", tsx: "typescript", rs: "rust", go: "go", java: "java",
  c: "c", h: "c", cc: "cpp", cpp: "cpp", hpp: "cpp", cs: "csharp", rb: "ruby", php: "php", sh: "bash", bash: "bash", zsh: "bash", json: "json", jsonl: "json",
  toml: "ini", ini: "ini", cfg: "ini", yaml: "yaml", yml: "yaml", md: "markdown", html: "xml", xml: "xml", svg: "xml", css: "css", scss: "scss", sql: "sql",
  kt: "kotlin", swift: "swift", lua: "lua", r: "r", pl: "perl", diff: "diff", patch: "diff", makefile: "makefile", console: "bash", shell: "bash",
};

/** The language of a file by its name; empty where it has none that is known. */
export function languageOf(path) {
  const name = String(path).split("/").at(-1).toLowerCase();
  return LANGUAGES[name] ?? LANGUAGES[name.split(".").at(-1)] ?? "";
}

const drawnTree = (node) => (typeof node === "string" ? node : node.scope ? html`<span class=${`h-${node.scope.split(".")[0]}`}>${node.children.map(drawnTree)}</span>` : node.children.map(drawnTree));

/** Code, coloured where its language is known. */
export function highlighted(text, language) {
  if (!language || text.length > MOST_CODE) return text;
  try {
    const tree = highlight(text, LANGUAGES[language] ?? language);
    return tree ? drawnTree(tree) : text;
  } catch {
    return text;
  }
}

export function Code({ text, language = "" }) {
  const drawn = useMemo(() => highlighted(text, language), [text, language]);
  return html`<pre class="code" tabindex="0">${drawn}</pre>`;
}

const NAMED = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
const unescaped = (text) =>
  text.replace(/&(?:#(\d{1,7})|#x([0-9a-f]{1,6})|([a-z]{2,6}));/gi, (whole, ten, sixteen, name) => {
    const code = ten ? Number(ten) : sixteen ? parseInt(sixteen, 16) : 0;
    if (code) return code < 0x110000 && (code < 0xd800 || code > 0xdfff) ? String.fromCodePoint(code) : whole;
    return NAMED[name] ?? whole;
  });

/** Only web pages: whatever else an address may be stays text. */
const address = (href) => (/^https?:\/\//i.test(href) ? href : null);

function Link({ href, children }) {
  const to = address(href);
  return to ? html`<a href=${to} target="_blank" rel="noopener noreferrer nofollow" title=${to}>${children}</a>` : html`<span title=${href}>${children}</span>`;
}

const INLINE = { strong: "strong", em: "em", del: "del" };

function inline(tokens = [], depth = 0) {
  if (depth > DEEPEST) return tokens.map((token) => token.raw);
  return tokens.map((token) => {
    const inside = () => inline(token.tokens, depth + 1);
    if (INLINE[token.type]) return html`<${INLINE[token.type]}>${inside()}<//>`;
    if (token.type === "codespan") return html`<code>${token.text}</code>`;
    if (token.type === "br") return html`<br />`;
    if (token.type === "link") return html`<${Link} href=${token.href}>${inside()}<//>`;
    if (token.type === "image") return html`<${Link} href=${token.href}>${token.text || token.href}<//>`;
    if (token.type === "checkbox") return html`<span class="box">${token.checked ? "☑" : "☐"} </span>`;
    if (token.type === "text") return token.tokens ? inside() : unescaped(token.text);
    if (token.type === "escape") return token.text;
    return token.raw;
  });
}

const ALIGN = { left: "start", center: "center", right: "end" };

function block(token, depth) {
  if (depth > DEEPEST) return html`<p>${token.raw}</p>`;
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "hr":
      return html`<hr />`;
    case "heading":
      return html`<p class=${`heading d${token.depth}`} role="heading" aria-level=${Math.min(6, token.depth + 2)}>${inline(token.tokens)}</p>`;
    case "code":
      return html`<${Code} text=${token.text} language=${(token.lang ?? "").trim().split(/\s/)[0].toLowerCase()} />`;
    case "blockquote":
      return html`<blockquote>${blocks(token.tokens, depth + 1)}</blockquote>`;
    case "list": {
      const items = token.items.map((item) => html`<li>${blocks(item.tokens, depth + 1)}</li>`);
      return token.ordered ? html`<ol start=${token.start || 1}>${items}</ol>` : html`<ul>${items}</ul>`;
    }
    case "table": {
      const cell = (each, tag, at) => html`<${tag} style=${{ textAlign: ALIGN[token.align[at]] ?? "" }}>${inline(each.tokens)}<//>`;
      return html`<div class="wide"><table><thead><tr>${token.header.map((each, at) => cell(each, "th", at))}</tr></thead><tbody>${token.rows.map((row) => html`<tr>${row.map((each, at) => cell(each, "td", at))}</tr>`)}</tbody></table></div>`;
    }
    case "paragraph":
      return html`<p>${inline(token.tokens)}</p>`;
    case "checkbox":
      return html`<span class="box">${token.checked ? "☑" : "☐"} </span>`;
    case "text":
      return token.tokens ? inline(token.tokens) : unescaped(token.text);
    default:
      // HTML among them: it is text.
      return html`<p>${token.raw}</p>`;
  }
}

const blocks = (tokens, depth) => tokens.map((token) => block(token, depth));

/** A text in Markdown; one that cannot be read as such, or is too long, as it is. */
export function Markdown({ text }) {
  const drawn = useMemo(() => {
    if (text.length > MOST) return null;
    try {
      return blocks(lexer(text, { gfm: true, breaks: true }), 0);
    } catch {
      return null;
    }
  }, [text]);
  return drawn ? html`<div class="words markdown">${drawn}</div>` : html`<div class="words">${text}</div>`;
}
