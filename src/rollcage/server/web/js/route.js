// Which view is shown. It is all in the address, so that every view can be linked, reloaded and gone back to.
import { signal } from "../vendor/preact.js";

export const route = signal(location.hash || "#/");
/** The list as it was last looked at, with its filters. */
export const list = signal("#/");

const isList = (hash) => hash === "#/" || hash.startsWith("#/?") || /^#\/(batches|compare)\//.test(hash);

function arrive(hash) {
  route.value = hash;
  if (isList(hash)) list.value = hash;
}

arrive(route.value);
addEventListener("hashchange", () => arrive(location.hash || "#/"));

/** Another address for what is shown now, without a step to go back to. */
export function replace(hash) {
  history.replaceState(null, "", hash);
  arrive(hash);
}

/** An address of the list; what is empty is left out. */
export function listAddress(entries) {
  const query = new URLSearchParams(Object.entries(entries).filter(([, value]) => value)).toString();
  return query ? `#/?${query}` : "#/";
}
