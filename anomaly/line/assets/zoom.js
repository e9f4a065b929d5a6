// A picture that is zoomed by wheel, dragged by mouse or finger, or zoomed by a program.

const MOST = 16; // times the frame

// Makes a picture that fills its frame zoomable. Returns by(factor), reset(), and isClose(): whether the
// picture is larger than the frame.
export function zoomable(frame, picture) {
  let scale = 1, x = 0, y = 0;

  function place() {
    x = Math.min(0, Math.max(x, frame.clientWidth * (1 - scale)));
    y = Math.min(0, Math.max(y, frame.clientHeight * (1 - scale)));
    picture.style.transform = `translate(${x}px, ${y}px) scale(${scale})`;
    frame.classList.toggle("close", scale > 1);
  }

  function by(factor, atX = frame.clientWidth / 2, atY = frame.clientHeight / 2) {
    const before = scale;
    scale = Math.min(MOST, Math.max(1, scale * factor));
    x = atX - ((atX - x) * scale) / before;
    y = atY - ((atY - y) * scale) / before;
    place();
  }

  function reset() {
    scale = 1;
    place();
  }

  frame.addEventListener("wheel", (event) => {
    if (scale === 1 && event.deltaY > 0) return; // the page scrolls
    event.preventDefault();
    const { left, top } = frame.getBoundingClientRect(), lines = event.deltaMode ? 30 : 1;
    const turned = Math.max(-100, Math.min(100, event.deltaY * lines));
    by(Math.exp(-turned / 300), event.clientX - left, event.clientY - top);
  }, { passive: false });
  frame.addEventListener("pointermove", (event) => {
    if (!event.buttons || scale === 1 || event.target.closest("button")) return;
    frame.setPointerCapture(event.pointerId);
    x += event.movementX;
    y += event.movementY;
    place();
  });
  frame.addEventListener("dblclick", (event) => event.target.closest("button") || reset());
  return { by, reset, isClose: () => scale > 1 };
}
