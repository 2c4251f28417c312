// Staying at the end of what grows. Owns: when a box follows its end, and when it leaves the reader alone.
import { useLayoutEffect, useRef, useState } from "preact/hooks";

const AT_END = 24; // pixels from the end that count as being there
const FAR = 90; // from here on there is a way back

// {box, follow, away, toEnd, onScroll}: `follow()` keeps the end in sight, unless the reader has scrolled up; `away`: the end is far.
export function useFollow() {
  const box = useRef(null);
  const follows = useRef(true);
  const before = useRef({ top: 0, height: 0 });
  const [away, setAway] = useState(false);
  const note = () => {
    const { scrollTop: top, scrollHeight: height } = box.current;
    before.current = { top, height };
  };
  const toEnd = () => {
    if (!box.current) return; // what grows may outlive the box that it was shown in
    follows.current = true;
    box.current.scrollTop = box.current.scrollHeight;
    note();
  };
  const left = () => box.current.scrollHeight - box.current.scrollTop - box.current.clientHeight;
  const follow = () => (follows.current ? toEnd() : box.current && setAway(left() > FAR));
  const onScroll = () => {
    if (!box.current) return; // the last one comes when the box has gone
    const { scrollTop: top, scrollHeight: height } = box.current;
    if (left() < AT_END) follows.current = true;
    else if (top < before.current.top && height >= before.current.height) follows.current = false; // whoever scrolls up wants to read there
    note();
    setAway(left() > FAR);
  };
  useLayoutEffect(note, []);
  return { box, follow, away, toEnd, onScroll };
}
