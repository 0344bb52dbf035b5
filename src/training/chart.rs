//! `loss.svg`: training and validation loss over the steps.

use std::fs;
use std::path::Path;

use plotters::prelude::*;
use serde_json::Value;

use crate::failure::Failure;
use crate::run_folder::{CHART, METRICS, write_atomic};

const SIZE: (u32, u32) = (900, 500);

/// Draws the losses in a run folder's `metrics.jsonl` into its `loss.svg`.
///
/// # Errors
/// If a file cannot be read or written.
pub(crate) fn draw(folder: &Path) -> Result<(), Failure> {
    let file = folder.join(METRICS);
    let text = fs::read_to_string(&file).map_err(Failure::io(&file))?;
    let lines: Vec<Value> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let points = |event: &str| -> Vec<(f64, f64)> {
        let of_event = lines.iter().filter(|line| line["event"] == event);
        of_event.filter_map(|line| Some((line["step"].as_f64()?, line["loss"].as_f64()?))).collect()
    };
    let (train, valid) = (points("train"), points("valid"));
    let all = || train.iter().chain(&valid);
    let Some(last) = all().map(|(step, _)| *step).reduce(f64::max) else { return Ok(()) };
    let lowest = all().map(|(_, loss)| *loss).fold(f64::INFINITY, f64::min);
    let highest = all().map(|(_, loss)| *loss).fold(f64::NEG_INFINITY, f64::max);
    let margin = ((highest - lowest) * 0.05).max(1e-3);

    let mut svg = String::new();
    plot(&mut svg, last, lowest - margin..highest + margin, &train, &valid)
        .map_err(|error| Failure::new(format!("loss.svg could not be drawn: {error}")))?;
    write_atomic(&folder.join(CHART), svg.as_bytes())
}

fn plot(
    svg: &mut String,
    last: f64,
    losses: std::ops::Range<f64>,
    train: &[(f64, f64)],
    valid: &[(f64, f64)],
) -> Result<(), Box<dyn std::error::Error>> {
    let (faint, strong) = (RGBColor(214, 137, 80), RGBColor(40, 60, 110));
    let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .margin(16)
        .x_label_area_size(36)
        .y_label_area_size(48)
        .build_cartesian_2d(0.0..last, losses)?;
    chart.configure_mesh().x_desc("step").y_desc("loss, nats a token").light_line_style(WHITE).draw()?;
    let line = |color: RGBColor| move |(x, y)| PathElement::new(vec![(x, y), (x + 16, y)], color);
    chart.draw_series(LineSeries::new(train.iter().copied(), faint))?.label("training").legend(line(faint));
    let thick = strong.stroke_width(2);
    chart.draw_series(LineSeries::new(valid.iter().copied(), thick))?.label("validation").legend(line(strong));
    chart.configure_series_labels().background_style(WHITE).border_style(faint).draw()?;
    area.present()?;
    Ok(())
}
