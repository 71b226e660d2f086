// Sets the colours before the first paint. A classic script, so that it runs before the body.
"use strict";
(() => {
  const choice = localStorage.getItem("cachefs-theme");
  if (choice === "light" || choice === "dark") document.documentElement.dataset.theme = choice;
})();
