//! Roofline plots (Williams, Waterman and Patterson, 2009).

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::{INK, Svg, undrawn};
use crate::failure::Failure;

/// Limits of a device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Roof {
    /// Memory bandwidth.
    pub bytes_per_second: f64,
    /// Matrix throughput.
    pub flops_per_second: f64,
}

/// An operation in the plot.
#[derive(Clone, Debug, PartialEq)]
pub struct Dot {
    /// Its name.
    pub name: String,
    /// Arithmetic intensity: FLOP per byte that it must move.
    pub flops_per_byte: f64,
    /// Throughput in FLOP/s.
    pub flops_per_second: f64,
    /// Its share of the time, 0 to 1: the dot's size.
    pub share: f64,
}

/// Number of dots with labels.
const NAMED: usize = 6;

/// Plots on logarithmic axes.
///
/// # Errors
/// If there are no dots, or a value is not above zero.
pub fn roofline(title: &str, roof: Roof, dots: &[Dot]) -> Result<Svg, Failure> {
    let figures = dots.iter().flat_map(|dot| [dot.flops_per_byte, dot.flops_per_second]);
    let all = figures.chain([roof.bytes_per_second, roof.flops_per_second]);
    if dots.is_empty() || !all.into_iter().all(|figure| figure.is_finite() && figure > 0.0) {
        return Err(undrawn("a roofline needs dots and positive values"));
    }
    let mut svg = String::new();
    let area = SVGBackend::with_string(&mut svg, (900, 520)).into_drawing_area();
    draw(&area, title, roof, dots).map_err(undrawn)?;
    drop(area);
    Ok(Svg(svg))
}

fn draw(
    area: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>,
    title: &str,
    roof: Roof,
    dots: &[Dot],
) -> Result<(), Box<dyn std::error::Error>> {
    let Roof { bytes_per_second, flops_per_second: peak } = roof;
    let ridge = peak / bytes_per_second;
    let across = dots.iter().map(|dot| dot.flops_per_byte).chain([ridge]);
    let (left, right) = (across.clone().fold(f64::INFINITY, f64::min) / 3.0, across.fold(0.0, f64::max) * 3.0);
    let up = dots.iter().map(|dot| dot.flops_per_second);
    let bottom = up.clone().fold(left * bytes_per_second, f64::min) / 2.0;
    let top = up.fold(peak, f64::max) * 2.0;
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(area)
        .margin(16)
        .caption(title, ("sans-serif", 18).into_font().color(&INK))
        .x_label_area_size(40)
        .y_label_area_size(64)
        .build_cartesian_2d((left..right).log_scale(), (bottom..top).log_scale())?;
    chart
        .configure_mesh()
        .x_desc("floating-point operations per byte")
        .y_desc("TFLOP/s")
        .x_label_formatter(&|x| format!("{x}"))
        .y_label_formatter(&|y| format!("{}", y / 1e12))
        .light_line_style(WHITE)
        .draw()?;
    let corners = [(left, left * bytes_per_second), (ridge, peak), (right, peak)];
    // If all dots are right of the ridge, the slope is outside the plot.
    let line = corners.into_iter().filter(|(x, y)| *x >= left && *y >= bottom);
    chart.draw_series(LineSeries::new(line, INK.stroke_width(2)))?;
    let colour = RGBColor(0, 70, 140);
    let size = |share: f64| 3 + (14.0 * share.clamp(0.0, 1.0).sqrt()) as i32;
    chart.draw_series(dots.iter().map(|dot| {
        Circle::new((dot.flops_per_byte, dot.flops_per_second), size(dot.share), colour.mix(0.5).filled())
    }))?;
    let mut named: Vec<&Dot> = dots.iter().collect();
    named.sort_by(|a, b| b.share.total_cmp(&a.share));
    let style = ("sans-serif", 12).into_font().color(&INK).pos(Pos::new(HPos::Left, VPos::Center));
    let mut taken: Vec<(i32, i32)> = Vec::new();
    for dot in named.into_iter().take(NAMED) {
        let (x, mut y) = chart.backend_coord(&(dot.flops_per_byte, dot.flops_per_second));
        // Overlapping labels are moved down.
        while taken.iter().any(|(other_x, other_y)| (x - other_x).abs() < 160 && (y - other_y).abs() < 13) {
            y += 13;
        }
        taken.push((x, y));
        area.draw_text(&dot.name, &style, (x + size(dot.share) + 4, y))?;
    }
    area.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_has_its_dot() {
        let roof = Roof { bytes_per_second: 4e12, flops_per_second: 9e14 };
        let dot = |name: &str, flops_per_byte: f64, share: f64| Dot {
            name: name.into(),
            flops_per_byte,
            flops_per_second: 1e13,
            share,
        };
        let svg =
            roofline("H200", roof, &[dot("linear", 300.0, 0.5), dot("draw", 1.0, 0.1)]).expect("drawn").to_string();
        assert!(svg.matches("<circle").count() == 2 && svg.contains("linear") && svg.contains("draw"), "{svg}");
        assert!(roofline("", roof, &[]).is_err());
        assert!(roofline("", roof, &[dot("never", 0.0, 1.0)]).is_err());
    }
}
