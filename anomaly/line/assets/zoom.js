// A picture that can be looked at closely: by wheel, two fingers and dragging, or by a program.

const MOST = 16;

// Makes a picture that fills its frame zoomable; `changed` gets whether it is larger than the frame.
// Returns by(factor), and reset().
export function zoomable(frame, picture, changed) {
  let scale = 1, x = 0, y = 0;
  const fingers = new Map(); // where each pointer that is down was last

  function place() {
    x = Math.min(0, Math.max(x, frame.clientWidth * (1 - scale)));
    y = Math.min(0, Math.max(y, frame.clientHeight * (1 - scale)));
    picture.style.transform = `translate(${x}px, ${y}px) scale(${scale})`;
    frame.classList.toggle("close", scale > 1);
    changed(scale > 1);
  }

  function by(factor, point = { x: frame.clientWidth / 2, y: frame.clientHeight / 2 }) {
    const before = scale;
    scale = Math.min(MOST, Math.max(1, scale * factor));
    x = point.x - ((point.x - x) * scale) / before;
    y = point.y - ((point.y - y) * scale) / before;
    place();
  }

  function reset() {
    scale = 1;
    place();
  }

  function inside(event) {
    const { left, top } = frame.getBoundingClientRect();
    return { x: event.clientX - left, y: event.clientY - top };
  }

  function move(event) {
    const before = fingers.get(event.pointerId), now = inside(event);
    if (!before) return;
    fingers.set(event.pointerId, now);
    const [other] = [...fingers].filter(([id]) => id !== event.pointerId).map(([, point]) => point);
    if (other) {
      const apart = (point) => Math.hypot(point.x - other.x, point.y - other.y) || 1;
      by(apart(now) / apart(before), other);
    } else {
      x += now.x - before.x;
      y += now.y - before.y;
      place();
    }
  }

  frame.addEventListener("wheel", (event) => {
    if (scale === 1 && event.deltaY > 0) return; // the page scrolls
    event.preventDefault();
    const lines = event.deltaMode ? 30 : 1;
    by(Math.exp(-Math.max(-100, Math.min(100, event.deltaY * lines)) / 300), inside(event));
  }, { passive: false });
  frame.addEventListener("pointerdown", (event) => {
    if (event.target.closest("button")) return;
    fingers.set(event.pointerId, inside(event));
    frame.setPointerCapture(event.pointerId);
  });
  frame.addEventListener("pointermove", move);
  for (const end of ["pointerup", "pointercancel"]) {
    frame.addEventListener(end, (event) => fingers.delete(event.pointerId));
  }
  frame.addEventListener("dblclick", (event) => event.target.closest("button") || reset());
  return { by, reset };
}
