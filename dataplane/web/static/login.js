// Sends the token that is typed, or that comes behind the # of the address, which browsers send to nobody.

const form = document.getElementById("form");
const field = document.getElementById("token");
const said = document.getElementById("said");

async function send(token) {
  said.textContent = "";
  try {
    const answer = await fetch("/login", { method: "POST", body: token, headers: { "Content-Type": "text/plain" } });
    if (answer.ok) {
      location.replace("/");
      return;
    }
    said.textContent = answer.status === 401 ? "This is not the token." : `The server answers ${answer.status}.`;
  } catch {
    said.textContent = "The server does not answer.";
  }
  field.focus();
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  send(field.value);
});
const given = decodeURIComponent(location.hash.slice(1));
if (given) {
  history.replaceState(null, "", "/");
  send(given);
} else {
  field.focus();
}
