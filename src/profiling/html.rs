//! The profile as a single-file page: the table, a flame graph, the roofline.

use std::fmt::Write;

use super::{Profile, Row, verdicts};
use crate::failure::Failure;
use crate::plots::{Dot, Roof, roofline};

const STYLE: &str = "\
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1100px;padding:0 1rem;color:#222;background:#fff}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}
pre{overflow-x:auto;font-size:12px;line-height:1.45;background:#f6f6f4;padding:1rem}
li{margin:.3rem 0}svg{max-width:100%;height:auto}.flame rect{stroke:#fff}.flame rect:hover{opacity:.75}";

pub(super) fn page(profile: &Profile) -> Result<String, Failure> {
    let mut page = String::new();
    let title = escaped(&format!("{} on {}", profile.name, profile.device));
    let verdicts: String =
        verdicts(profile).iter().map(|verdict| format!("<li>{}</li>", escaped(&verdict.to_string()))).collect();
    let verdicts = if verdicts.is_empty() { "<p>No findings.</p>".into() } else { format!("<ul>{verdicts}</ul>") };
    let _ = write!(
        page,
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width\">\
         <title>{title}</title><style>{STYLE}</style></head><body><h1>{title}</h1><h2>Findings</h2>{verdicts}\
         <h2>Flame graph</h2><p>One {} from left to right: parts of the model, their operations, and kernels. \
         Hover over a box for details.</p>{}",
        profile.unit,
        flame(profile)
    );
    if let Some(picture) = roof(profile)? {
        let _ = write!(
            page,
            "<h2>Roofline</h2><p>FLOP per second of an operation over its FLOP per \
             byte; the line is the hardware limit (Williams et al., 2009).</p>{picture}"
        );
    }
    let _ = write!(page, "<h2>Table</h2><pre>{}</pre></body></html>", escaped(&profile.to_string()));
    Ok(page)
}

/// The roofline with a dot per operation, if there are operations with products and a known peak.
fn roof(profile: &Profile) -> Result<Option<String>, Failure> {
    let report = &profile.report;
    let dots: Vec<Dot> = profile
        .rows()
        .into_iter()
        .filter_map(|row| {
            let (flops, bytes) = (row.flops_per_second?, row.bytes_per_second?);
            Some(Dot { name: row.name(), flops_per_byte: flops / bytes, flops_per_second: flops, share: row.share })
        })
        .collect();
    let dtype = report.ops.iter().max_by_key(|op| op.flops).and_then(|op| op.inputs.first()).map(|input| input.dtype);
    let (Some(peaks), Some(dtype), false) = (profile.ceilings.peaks, dtype, dots.is_empty()) else { return Ok(None) };
    let roof = Roof { bytes_per_second: profile.ceilings.bytes_per_second, flops_per_second: peaks.for_dtype(dtype) };
    Ok(Some(roofline(&format!("{}, {}", profile.device, dtype.name()), roof, &dots)?.to_string()))
}

/// A box of the flame graph.
struct Tile<'a> {
    depth: usize,
    start: f64,
    width: f64,
    name: &'a str,
    title: String,
}

/// Parts above operations above kernels, each as wide as its share.
fn flame(profile: &Profile) -> String {
    const WIDTH: f64 = 1068.0;
    const HEIGHT: usize = 26;
    let rows = profile.rows();
    let mut parts: Vec<(&str, Vec<&Row>)> = Vec::new();
    for row in &rows {
        let part = if row.part.is_empty() { "outside any part" } else { &row.part };
        match parts.iter_mut().find(|(name, _)| *name == part) {
            Some((_, rows)) => rows.push(row),
            None => parts.push((part, vec![row])),
        }
    }
    let mut tiles = Vec::new();
    let percent = |share: f64| format!("{:.1}%", 100.0 * share);
    let mut start = 0.0;
    for (part, rows) in &parts {
        let width: f64 = rows.iter().map(|row| row.share).sum();
        tiles.push(Tile { depth: 0, start, width, name: part, title: format!("{part}: {}", percent(width)) });
        let mut at = start;
        for row in rows {
            let title = format!("{}: {}, {} calls", row.name(), percent(row.share), row.calls);
            tiles.push(Tile { depth: 1, start: at, width: row.share, name: &row.op, title });
            let all: f64 = row.kernels.iter().filter_map(|kernel| kernel.time).map(|time| time.as_secs_f64()).sum();
            let mut inner = at;
            for kernel in &row.kernels {
                let share = kernel.time.map_or(0.0, |time| row.share * time.as_secs_f64() / all.max(1e-12));
                let title = format!("{}: {}, {} launches", kernel.name, percent(share), kernel.launches);
                tiles.push(Tile { depth: 2, start: inner, width: share, name: &kernel.name, title });
                inner += share;
            }
            at += row.share;
        }
        start += width;
    }
    let depth = tiles.iter().map(|tile| tile.depth + 1).max().unwrap_or(0);
    let mut svg = format!(
        "<svg class=\"flame\" xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {}\" \
         font-family=\"sans-serif\" font-size=\"12\">",
        depth * HEIGHT
    );
    for Tile { depth, start, width, name, title } in tiles.into_iter().filter(|tile| tile.width * WIDTH >= 0.5) {
        let (x, y, wide) = (start * WIDTH, depth * HEIGHT, width * WIDTH);
        let room = (wide / 7.0) as usize;
        let text: String = if room < 3 { String::new() } else { name.chars().take(room).collect() };
        // A fixed colour per name.
        let hue = name.bytes().fold(7u32, |hue, byte| hue.wrapping_mul(31).wrapping_add(byte.into())) % 360;
        let _ = write!(
            svg,
            "<g><title>{}</title>\
             <rect x=\"{x:.2}\" y=\"{y}\" width=\"{wide:.2}\" height=\"{HEIGHT}\" fill=\"hsl({hue},55%,78%)\"/>\
             <text x=\"{:.2}\" y=\"{}\" fill=\"#222\" pointer-events=\"none\">{}</text></g>",
            escaped(&title),
            x + 4.0,
            y + 17,
            escaped(&text)
        );
    }
    svg + "</svg>"
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
