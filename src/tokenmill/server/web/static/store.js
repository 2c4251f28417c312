// Values that views watch. Owns: makeStore, useStore, kept(). Knows nothing of what is stored.
import { useEffect, useState } from "preact/hooks";

export function makeStore(initial) {
  let value = initial;
  const watchers = new Set();
  return {
    get: () => value,
    set(patch) {
      value = { ...value, ...patch };
      for (const watcher of [...watchers]) watcher(value);
    },
    subscribe(watcher) {
      watchers.add(watcher);
      return () => watchers.delete(watcher);
    },
  };
}

// The store's present value; the component is drawn again when it changes.
export function useStore(store) {
  const [, draw] = useState(0);
  useEffect(() => store.subscribe(() => draw((n) => n + 1)), [store]);
  return store.get();
}

// A JSON value in a Storage that may be full, forbidden, or hold nonsense.
export function kept(storage, name, fallback) {
  return {
    read() {
      try {
        const text = globalThis[storage].getItem(name);
        return text === null ? fallback : JSON.parse(text);
      } catch {
        return fallback;
      }
    },
    write(value) {
      try {
        globalThis[storage].setItem(name, JSON.stringify(value));
      } catch {
        // Private windows may refuse: the value then lives as long as the page.
      }
    },
  };
}
