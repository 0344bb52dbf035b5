//! Figures for Prometheus.

use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::inference::generation::scheduler::Load;

type Labels = [(&'static str, String); 2];

/// Upper ends of the histograms' buckets, in seconds.
const FIRST_TOKEN: [f64; 11] = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];
const REQUEST: [f64; 11] = [0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0, 300.0];

/// What is measured. Each figure that vLLM has, too, is there by its name as well, for dashboards
/// made for it.
pub(super) struct Metrics {
    registry: Registry,
    requests: Family<Labels, Counter>,
    seconds: Histogram,
    prompt_tokens: Counter,
    tokens: Counter,
    first_token: Histogram,
    queued: Gauge,
    reading: Gauge,
    writing: Gauge,
    pages: Gauge,
    pages_left: Gauge,
    preemptions: Counter<u64, AtomicU64>,
    /// Tokens of prompts that were looked for in the cache, and those that it had.
    cache_queries: Counter,
    cache_hits: Counter,
    running: Gauge,
    usage: Gauge<f64, AtomicU64>,
    finished: Family<[(&'static str, String); 1], Counter>,
}

impl Metrics {
    /// Figures of a model of a name.
    pub(super) fn new(model: &str) -> Self {
        let mut registry = Registry::default();
        macro_rules! metric {
            ($name:literal, $help:literal, $metric:expr) => {{
                let metric = $metric;
                registry.register(concat!("fireclay_", $name), $help, metric.clone());
                metric
            }};
        }
        let requests = metric!("requests", "Requests answered, by path and status", Family::default());
        let seconds =
            metric!("request_seconds", "Time until an answer was complete", Histogram::new(REQUEST.into_iter()));
        let prompt_tokens = metric!("prompt_tokens", "Tokens of prompts", Counter::default());
        let tokens = metric!("tokens", "Tokens generated", Counter::default());
        let first_token = metric!(
            "first_token_seconds",
            "Time from a request to the first token of its answer",
            Histogram::new(FIRST_TOKEN.into_iter())
        );
        let queued = metric!("queued", "Sequences that wait for the device", Gauge::default());
        let reading =
            metric!("reading", "Sequences in prefill, or behind it, which wait for their turn", Gauge::default());
        let writing = metric!("writing", "Sequences that are decoded", Gauge::default());
        let pages = metric!("cache_pages", "Pages of the KV cache", Gauge::default());
        let pages_left = metric!("cache_pages_left", "Pages of the KV cache that no sequence has", Gauge::default());
        let preemptions = metric!("preemptions", "Sequences that were preempted", Counter::default());
        let cache_queries =
            metric!("prefix_cache_queries", "Tokens of prompts looked for in the KV cache", Counter::default());
        let cache_hits = metric!("prefix_cache_hits", "Tokens of prompts found in the KV cache", Counter::default());
        let vllm = registry.sub_registry_with_label(("model_name".into(), model.to_string().into()));
        let (running, usage, finished) = (Gauge::default(), Gauge::default(), Family::default());
        vllm.register("vllm:num_requests_running", "Sequences in prefill or decoded", running.clone());
        vllm.register("vllm:num_requests_waiting", "Sequences that wait", queued.clone());
        vllm.register("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 1 for all", usage.clone());
        vllm.register("vllm:num_preemptions", "Sequences that were preempted", preemptions.clone());
        vllm.register("vllm:prefix_cache_queries", "Tokens looked for in the KV cache", cache_queries.clone());
        vllm.register("vllm:prefix_cache_hits", "Tokens found in the KV cache", cache_hits.clone());
        vllm.register("vllm:prompt_tokens", "Tokens of prompts", prompt_tokens.clone());
        vllm.register("vllm:generation_tokens", "Tokens generated", tokens.clone());
        vllm.register("vllm:request_success", "Sequences that are complete, by reason", finished.clone());
        vllm.register("vllm:time_to_first_token_seconds", "Time to the first token", first_token.clone());
        vllm.register("vllm:e2e_request_latency_seconds", "Time of a request", seconds.clone());
        Self {
            registry,
            requests,
            seconds,
            prompt_tokens,
            tokens,
            first_token,
            queued,
            reading,
            writing,
            pages,
            pages_left,
            preemptions,
            cache_queries,
            cache_hits,
            running,
            usage,
            finished,
        }
    }

    /// What the device has to do.
    pub(super) fn load(&self, load: Load, queued: usize) {
        self.queued.set((queued + load.waiting) as i64);
        self.reading.set(load.prefilling as i64);
        self.writing.set(load.decoding as i64);
        self.running.set((load.prefilling + load.decoding) as i64);
        self.pages.set(load.pages as i64);
        self.pages_left.set(load.free_pages as i64);
        self.usage.set((load.pages - load.free_pages) as f64 / load.pages.max(1) as f64);
        self.preemptions.inc_by((load.preemptions as u64).saturating_sub(self.preemptions.get()));
    }

    /// A prompt of so many tokens.
    pub(super) fn prompt(&self, tokens: u64) {
        self.prompt_tokens.inc_by(tokens);
    }

    /// Of so many tokens of a prompt the cache had some.
    pub(super) fn cached(&self, tokens: u64, cached: u64) {
        self.cache_queries.inc_by(tokens);
        self.cache_hits.inc_by(cached);
    }

    /// More tokens of an answer; its first ones after some seconds.
    pub(super) fn written(&self, tokens: u64, first: Option<f64>) {
        self.tokens.inc_by(tokens);
        if let Some(seconds) = first {
            self.first_token.observe(seconds);
        }
    }

    /// A sequence is complete.
    pub(super) fn finished(&self, reason: &str) {
        self.finished.get_or_create(&[("finished_reason", reason.to_string())]).inc();
    }

    /// An answer to a request of a path that there is.
    pub(super) fn request(&self, path: &'static str, status: u16, seconds: f64) {
        self.requests.get_or_create(&[("path", path.to_string()), ("status", status.to_string())]).inc();
        self.seconds.observe(seconds);
    }

    /// As Prometheus reads it.
    pub(super) fn text(&self) -> Result<String, std::fmt::Error> {
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_vllms_names_too() {
        let metrics = Metrics::new("pots");
        metrics.load(Load { pages: 4, free_pages: 1, prefilling: 1, decoding: 2, ..Load::default() }, 5);
        metrics.cached(100, 64);
        metrics.written(7, Some(0.2));
        metrics.finished("stop");
        let text = metrics.text().expect("a text");
        for line in [
            "fireclay_tokens_total 7",
            "vllm:generation_tokens_total{model_name=\"pots\"} 7",
            "vllm:num_requests_running{model_name=\"pots\"} 3",
            "vllm:num_requests_waiting{model_name=\"pots\"} 5",
            "vllm:kv_cache_usage_perc{model_name=\"pots\"} 0.75",
            "vllm:prefix_cache_hits_total{model_name=\"pots\"} 64",
            "vllm:request_success_total{model_name=\"pots\",finished_reason=\"stop\"} 1",
            "vllm:time_to_first_token_seconds_count{model_name=\"pots\"} 1",
        ] {
            assert!(text.lines().any(|other| other == line), "no {line} in {text}");
        }
    }
}
