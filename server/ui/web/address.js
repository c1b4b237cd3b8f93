// The address of what is shown, in the part after "#": a conversation (#/c/ID) or another view. Links and the browser's
// buttons go through them.

/** @import {State} from "../src/types.js" */
import {get, set, subscribe} from "./store.js";

const addressOf = (/** @type {Pick<State, "view" | "current">} */ {view, current}) =>
  (view !== "chat" ? `#/${view}` : current ? `#/c/${encodeURIComponent(current)}` : "");

/**
 * What an address shows.
 * @returns {Pick<State, "view" | "current"> | null}
 */
function shownAt(/** @type {string} */ hash) {
  const [, kind, id] = /^#\/(c|compare|tune)(?:\/(.+))?$/.exec(hash) ?? [];
  if (!kind) return hash === "" || hash === "#/" || hash === "#" ? {view: "chat", current: null} : null;
  if (kind !== "c") return {view: kind === "tune" ? "tune" : "compare", current: get().current};
  try {
    return {view: "chat", current: id ? decodeURIComponent(id) : null};
  } catch {
    return {view: "chat", current: null};
  }
}

/** Show what the address says, and keep the address that of what is shown. */
export function followAddress() {
  const take = () => {
    const shown = shownAt(location.hash);
    if (shown && addressOf(shown) !== addressOf(get())) set({...shown, side: false});
  };
  take();
  addEventListener("popstate", take);
  subscribe((now, before) => {
    if (now.view === before.view && now.current === before.current) return;
    const address = addressOf(now), here = addressOf(shownAt(location.hash) ?? before);
    if (address !== here) history.pushState(null, "", address || location.pathname + location.search);
  });
}
