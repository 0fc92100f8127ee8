// Restores the chosen theme before anything is painted.
document.documentElement.classList.add("js");
try {
  const chosen = localStorage.getItem("leanbayes-theme");
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
} catch {
  // Without storage, the theme of the system is used.
}
