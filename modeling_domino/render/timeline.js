// The behaviour of a timeline and of a race, for the Space and for the static page. Everything is delegated to the root
// element, because the Space replaces what is inside while a run is streamed.
function dominoView(root) {
  const all = (selector) => [...root.querySelectorAll(selector)];
  const one = (selector) => root.querySelector(selector);

  // What a chip says: on hover, on focus and on a tap.
  let tip = null;
  function hide() {
    if (tip) tip.remove();
    tip = null;
  }
  function show(chip) {
    hide();
    const frame = one(".dm-rows").parentElement.closest(".domino");
    tip = document.createElement("div");
    tip.className = "dm-tip";
    tip.setAttribute("aria-hidden", "true");
    tip.textContent = chip.getAttribute("aria-label");
    frame.append(tip);
    const box = frame.getBoundingClientRect(), at = chip.getBoundingClientRect();
    const left = Math.min(at.left - box.left, box.width - tip.offsetWidth - 4);
    tip.style.left = `${Math.max(0, left)}px`;
    tip.style.top = `${at.bottom - box.top + 6}px`;
  }
  const chipOf = (event) => event.target.closest?.(".dm-rows .dm-tok[aria-label]");
  root.addEventListener("pointerover", (event) => { const chip = chipOf(event); if (chip) show(chip); });
  root.addEventListener("pointerout", (event) => { if (chipOf(event)) hide(); });
  root.addEventListener("focusin", (event) => {
    const chip = chipOf(event);
    if (!chip) return;
    all('.dm-rows .dm-tok[tabindex="0"]').forEach((other) => other.setAttribute("tabindex", "-1"));
    chip.setAttribute("tabindex", "0");
    show(chip);
  });
  root.addEventListener("focusout", hide);

  // One stop of the Tab key; the arrows move from chip to chip and from row to row.
  root.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return hide();
    const chip = chipOf(event);
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    if (!chip || !(event.key in moves)) return;
    event.preventDefault();
    const rows = all(".dm-row").map((row) => [...row.querySelectorAll(".dm-tok")].filter((other) => other.offsetParent));
    const row = rows.findIndex((chips) => chips.includes(chip));
    const [down, right] = moves[event.key];
    const chips = rows[row + down];
    if (!chips || !chips.length) return;
    const to = Math.min(rows[row].indexOf(chip) + right, chips.length - 1);
    if (to >= 0) chips[to].focus();
  });

  // The scrubber shows the first so many rounds; replay moves it at the recorded pace.
  let timer = null;
  const numbered = () => all(".dm-row:not(.dm-prompt)");
  function seek(count) {
    const rows = numbered();
    rows.forEach((row, i) => row.classList.toggle("dm-later", i >= count));
    const given = rows.slice(0, count).reduce((sum, row) => sum + Number(row.dataset.given), 0);
    one(".dm-scrub").value = count;
    one(".dm-where").textContent = `${count} / ${rows.length} · ${given} tokens`;
  }
  function pause() {
    clearTimeout(timer);
    timer = null;
    const button = one(".dm-play");
    if (button) button.textContent = "▶ replay";
  }
  function advance(count) {
    const rows = numbered();
    if (!one(".dm-scrub")) return pause();
    seek(count);
    if (count >= rows.length) return pause();
    timer = setTimeout(() => advance(count + 1), Math.max(40, Number(rows[count].dataset.ms)));
  }
  root.addEventListener("input", (event) => {
    if (event.target.matches(".dm-scrub")) { pause(); seek(Number(event.target.value)); }
    if (event.target.matches(".dm-time")) { halt(); raceAt(Number(event.target.value) / 1000); }
  });
  root.addEventListener("change", (event) => {
    if (event.target.matches(".dm-headoff")) {
      hide();
      one(".dm-rows").classList.toggle("dm-show-off", event.target.checked);
      // The chip that the Tab key stopped at may be hidden now; another one takes its place.
      const chips = all(".dm-rows .dm-tok").filter((chip) => chip.offsetParent);
      if (chips.length && !chips.some((chip) => chip.tabIndex === 0)) chips[0].setAttribute("tabindex", "0");
    }
  });
  root.addEventListener("click", (event) => {
    if (event.target.closest(".dm-play")) {
      if (timer) return pause();
      event.target.textContent = "❚❚ pause";
      const now = Number(one(".dm-scrub").value);
      advance(now >= numbered().length ? 0 : now);
    }
    if (event.target.closest(".dm-go")) race(reached);
    const chip = chipOf(event);
    if (chip) {
      chip.focus();
      // A second tap on a chip that has the focus already.
      show(chip);
    }
  });

  // The race: what each lane had written at one time of the common clock.
  let frame = null, reached = 0;
  function raceAt(seconds) {
    reached = seconds;
    for (const lane of all(".dm-lane")) {
      const points = JSON.parse(lane.dataset.points), total = Number(lane.dataset.total);
      let tokens = 0;
      for (const [at, count] of points) if (at <= seconds + 1e-9) tokens = count;
      lane.querySelector(".dm-fill").style.width = `${(100 * tokens) / total}%`;
      lane.querySelector(".dm-count").textContent = `${tokens}/${total}`;
    }
    const clock = one(".dm-time");
    clock.value = Math.round(1000 * seconds);
    one(".dm-clock").textContent = `${seconds.toFixed(2)} s of ${(Number(clock.max) / 1000).toFixed(2)} s`;
  }
  function halt() {
    cancelAnimationFrame(frame);
    frame = null;
    const button = one(".dm-go");
    if (button) button.textContent = "▶ replay the race";
  }
  function race(from = 0) {
    if (frame) return halt();
    const end = Number(one(".dm-time").max) / 1000;
    const started = performance.now() - 1000 * (from < end ? from : 0);
    one(".dm-go").textContent = "❚❚ pause";
    const step = () => {
      if (!one(".dm-time")) return halt();
      const now = Math.min(end, (performance.now() - started) / 1000);
      raceAt(now);
      if (now < end) frame = requestAnimationFrame(step);
      else halt();
    };
    frame = requestAnimationFrame(step);
  }
  return { race };
}
