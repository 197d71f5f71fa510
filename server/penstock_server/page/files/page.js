// The page: its first line, its views, and the two addresses that it polls.
import { html, render, useEffect, useState } from "./vendor/preact.module.js";
import { link, usePoll, useRoute } from "./api.js";
import { BatchView, RowView } from "./batch.js";
import { DatasetsView, DatasetView } from "./datasets.js";
import { ExploreView } from "./explore.js";
import { clock, shown } from "./format.js";
import { JobsView, JobView } from "./jobs.js";
import { ServerView } from "./server.js";

const VIEWS = { "": JobsView, job: JobView, server: ServerView, datasets: DatasetsView, dataset: DatasetView, batch: BatchView, row: RowView, explore: ExploreView };
const MENU = [["", "Jobs", ["job"]], ["server", "Server", []], ["datasets", "Datasets", ["dataset"]], ["batch", "Batches", ["row"]], ["explore", "Explore", []]];
const SIGNS = { fed: "●", waiting: "▲", idle: "○" };

function Page() {
  const route = useRoute();
  const [numRanks, setNumRanks] = useState(0);
  const jobs = usePoll("v1/jobs", numRanks > 200 ? 10 : 2);
  useEffect(() => setNumRanks(jobs.data?.jobs.reduce((sum, job) => sum + job.ranks.length, 0) ?? 0), [jobs.data]);
  const datasets = usePoll("v1/datasets", 10);
  const View = VIEWS[route.view] ?? JobsView;
  useEffect(() => {
    document.title = [...route.names, route.view || "jobs", "Penstock"].join(" · ");
    scrollTo(0, 0);
  }, [route.view, route.names.join("/")]);
  const verdict = jobs.error
    ? { state: "waiting", text: `${jobs.error.message}${jobs.data ? ` This page is as of ${clock(jobs.data.server.time)}.` : ""}` }
    : jobs.data?.verdict ?? { state: "idle", text: "Asking the server …" };
  return html`
    <header>
      <p class="verdict ${verdict.state}" role="status"><span aria-hidden="true">${SIGNS[verdict.state]}</span> ${shown(verdict.text)}</p>
      <nav aria-label="views">
        ${MENU.map(([view, name, also]) => html`<a href=${link(view)} aria-current=${[view, ...also].includes(route.view) ? "page" : null}>${name}</a>`)}
        <a href="docs" class="away">API</a>
      </nav>
    </header>
    <main class=${jobs.error && jobs.data ? "stale" : ""}><${View} key=${route.view} ...${{ route, jobs: jobs.data, datasets: datasets.data, error: datasets.error }} /></main>
    <footer class="quiet">
      Penstock ${jobs.data?.server.version}. An HTTP cache between trainers and server hides requests from this page, and each server shows its own ranks.
      ${jobs.data?.caller && html`<form method="post" action="logout">Signed in as ${jobs.data.caller}. <button>Sign out</button></form>`}
    </footer>`;
}

render(html`<${Page} />`, document.body);
