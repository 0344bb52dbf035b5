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

/// What is measured.
pub(super) struct Metrics {
    registry: Registry,
    requests: Family<Labels, Counter>,
    seconds: Histogram,
    pub(super) prompt_tokens: Counter,
    pub(super) tokens: Counter,
    pub(super) first_token: Histogram,
    queued: Gauge,
    reading: Gauge,
    writing: Gauge,
    pages: Gauge,
    pages_left: Gauge,
    preemptions: Counter<u64, AtomicU64>,
}

impl Metrics {
    pub(super) fn new() -> Self {
        let mut registry = Registry::with_prefix("fireclay");
        macro_rules! metric {
            ($name:literal, $help:literal, $metric:expr) => {{
                let metric = $metric;
                registry.register($name, $help, metric.clone());
                metric
            }};
        }
        Self {
            requests: metric!("requests", "Requests answered, by path and status", Family::default()),
            seconds: metric!(
                "request_seconds",
                "Time until an answer was complete",
                Histogram::new(REQUEST.into_iter())
            ),
            prompt_tokens: metric!("prompt_tokens", "Tokens of prompts", Counter::default()),
            tokens: metric!("tokens", "Tokens written", Counter::default()),
            first_token: metric!(
                "first_token_seconds",
                "Time from a request to the first token of its answer",
                Histogram::new(FIRST_TOKEN.into_iter())
            ),
            queued: metric!("queued", "Texts that wait for the device", Gauge::default()),
            reading: metric!(
                "reading",
                "Texts whose prompts are being read, or were, and wait for their turn",
                Gauge::default()
            ),
            writing: metric!("writing", "Texts that are being written", Gauge::default()),
            pages: metric!("cache_pages", "Pages of the cache", Gauge::default()),
            pages_left: metric!("cache_pages_left", "Pages of the cache that no text has", Gauge::default()),
            preemptions: metric!("preemptions", "Texts that gave up their pages for others", Counter::default()),
            registry,
        }
    }

    /// What the device has to do.
    pub(super) fn load(&self, load: Load, queued: usize) {
        self.queued.set((queued + load.waiting) as i64);
        self.reading.set(load.reading as i64);
        self.writing.set(load.writing as i64);
        self.pages.set(load.pages as i64);
        self.pages_left.set(load.pages_left as i64);
        self.preemptions.inc_by((load.preemptions as u64).saturating_sub(self.preemptions.get()));
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
