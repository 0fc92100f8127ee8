// The theme that was chosen earlier, before anything is painted.
document.documentElement.classList.add("js");
try {
  const chosen = localStorage.getItem("leanbayes-theme");
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
} catch {
  // No storage: the system's theme it is.
}
