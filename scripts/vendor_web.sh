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
  swagger-ui-dist@5.34.1

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

# The page at /docs: Swagger UI as it was published, less the name of a source map that does not ship.
swagger=node_modules/swagger-ui-dist
grep -v '^//# sourceMappingURL=' $swagger/swagger-ui-bundle.js >"$target/swagger-ui.js"
grep -v '^/\*# sourceMappingURL=' $swagger/swagger-ui.css >"$target/swagger-ui.css"
cat $swagger/LICENSE $swagger/NOTICE $swagger/swagger-ui-bundle.js.LICENSE.txt >"$target/swagger-ui.LICENSE.txt"
