"use strict";
(() => {
  const form = document.getElementById("filter");
  const flips = [...document.querySelectorAll("details.flip")];
  const texts = flips.map((flip) => flip.textContent.toLowerCase());
  const shown = document.getElementById("shown");

  function apply() {
    const words = form.elements.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const chosen = [...form.querySelectorAll("select")].filter((select) => select.value !== "");
    let count = 0;
    flips.forEach((flip, index) => {
      const isWanted =
        words.every((word) => texts[index].includes(word)) &&
        chosen.every((select) => flip.dataset[select.name] === select.value);
      flip.hidden = !isWanted;
      count += isWanted;
    });
    shown.textContent = `${count} of ${flips.length} shown`;
  }

  form.addEventListener("input", apply);
  form.addEventListener("reset", () => setTimeout(apply));
  form.addEventListener("submit", (event) => event.preventDefault());
  form.hidden = false;
  apply();
})();
