#!/usr/bin/env bash
# Makes the libraries that the web pages use into the files that ship with them. Only needed to change their versions.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
target="$PWD/src/rollcage/server/web/vendor"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
npm init --yes >/dev/null
npm install --silent --no-audit --no-fund preact@11.2.0 @preact/signals@2.11.4 htm@3.1.1 esbuild@0.28.2 \
  swagger-ui-dist@5.34.1 marked@18.2.0 highlight.js@11.12.0

# The page at /web: Preact in one file.
cat >entry.js <<'ENTRY'
export { h, render, Fragment, createContext } from "preact";
export { useState, useEffect, useLayoutEffect, useRef, useMemo, useCallback, useContext } from "preact/hooks";
export { signal, computed, effect, batch, untracked, useSignal, useComputed, useSignalEffect } from "@preact/signals";
import { h } from "preact";
import htm from "htm";
export const html = htm.bind(h);
ENTRY
npx esbuild entry.js --bundle --minify --format=esm --target=es2022 --legal-comments=none --outfile=bundle.js
{
  echo "// Preact, its hooks and signals (MIT, Jason Miller and contributors) and htm (Apache-2.0), bundled by scripts/vendor_web.sh."
  cat bundle.js
} >"$target/preact.js"

# Markdown and code: what they are made of, as trees. Neither library makes HTML here; the page draws the trees itself.
cat >markdown_entry.js <<'ENTRY'
export { lexer } from "marked";
import hljs from "highlight.js/lib/common";
export function highlight(code, language) {
  if (!hljs.getLanguage(language)) return null;
  return hljs.highlight(code, { language, ignoreIllegals: true })._emitter.rootNode;
}
ENTRY
npx esbuild markdown_entry.js --bundle --minify --format=esm --target=es2022 --legal-comments=none --outfile=markdown.js
{
  echo "// marked (MIT) and highlight.js (BSD-3-Clause), bundled by scripts/vendor_web.sh; see markdown.LICENSE.txt."
  cat markdown.js
} >"$target/markdown.js"
cat node_modules/marked/LICENSE node_modules/highlight.js/LICENSE >"$target/markdown.LICENSE.txt"

# The page at /docs: Swagger UI as it was published, less the name of a source map that does not ship.
swagger=node_modules/swagger-ui-dist
grep -v '^//# sourceMappingURL=' $swagger/swagger-ui-bundle.js >"$target/swagger-ui.js"
grep -v '^/\*# sourceMappingURL=' $swagger/swagger-ui.css >"$target/swagger-ui.css"
cat $swagger/LICENSE $swagger/NOTICE $swagger/swagger-ui-bundle.js.LICENSE.txt >"$target/swagger-ui.LICENSE.txt"
