#!/usr/bin/env bash
# Makes the one library that the web page uses into the one file that ships with it. Only needed to change its version.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
target="$PWD/src/rollcage/server/static/vendor/preact.js"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
npm init --yes >/dev/null
npm install --silent --no-audit --no-fund preact@11.2.0 @preact/signals@2.11.4 htm@3.1.1 esbuild@0.28.2
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
} >"$target"
