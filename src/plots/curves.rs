//! Line plots.

use plotters::coord::Shift;
use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::prelude::*;

use super::{INK, Svg, undrawn};
use crate::failure::Failure;

const SIZE: (u32, u32) = (900, 500);

/// Colours distinguishable with any colour vision (Okabe and Ito, 2008).
const COLOURS: [RGBColor; 6] = [
    RGBColor(230, 159, 0),
    RGBColor(0, 70, 140),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(213, 94, 0),
];

/// A curve: its name in the legend, and its points in order of x.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve {
    /// Name in the legend.
    pub name: String,
    /// `(x, y)`; non-finite points are left out.
    pub points: Vec<(f64, f64)>,
}

impl Curve {
    /// A curve through `points`.
    pub fn new(name: impl Into<String>, points: impl IntoIterator<Item = (f64, f64)>) -> Self {
        Self { name: name.into(), points: points.into_iter().collect() }
    }
}

/// Plots curves; `labels` name the x and y axes.
///
/// # Errors
/// If no curve has a finite point.
pub fn curves(title: &str, labels: [&str; 2], curves: &[Curve]) -> Result<Svg, Failure> {
    let finite = |curve: &Curve| -> Vec<(f64, f64)> {
        curve.points.iter().copied().filter(|(x, y)| x.is_finite() && y.is_finite()).collect()
    };
    let points: Vec<Vec<(f64, f64)>> = curves.iter().map(finite).collect();
    let range = |of: fn(&(f64, f64)) -> f64| -> Option<(f64, f64)> {
        let values = || points.iter().flatten().map(of);
        Some((values().reduce(f64::min)?, values().reduce(f64::max)?))
    };
    let (Some(across), Some(up)) = (range(|point| point.0), range(|point| point.1)) else {
        return Err(undrawn("there are no points"));
    };
    let margin = ((up.1 - up.0) * 0.05).max(1e-3);
    let (x, y) = (across.0..across.1.max(across.0 + 1e-9), up.0 - margin..up.1 + margin);
    let named: Vec<(&str, Vec<(f64, f64)>)> = curves.iter().map(|curve| &*curve.name).zip(points).collect();
    let mut svg = String::new();
    let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
    draw(&area, title, labels, (x, y), &named).map_err(undrawn)?;
    drop(area);
    Ok(Svg(svg))
}

fn draw<X, Y>(
    area: &DrawingArea<SVGBackend<'_>, Shift>,
    title: &str,
    [x_label, y_label]: [&str; 2],
    (x, y): (X, Y),
    curves: &[(&str, Vec<(f64, f64)>)],
) -> Result<(), Box<dyn std::error::Error>>
where
    X: AsRangedCoord<Value = f64>,
    Y: AsRangedCoord<Value = f64>,
    X::CoordDescType: ValueFormatter<f64>,
    Y::CoordDescType: ValueFormatter<f64>,
{
    area.fill(&WHITE)?;
    let mut builder = ChartBuilder::on(area);
    builder.margin(16).x_label_area_size(36).y_label_area_size(56);
    if !title.is_empty() {
        builder.caption(title, ("sans-serif", 18).into_font().color(&INK));
    }
    let mut chart = builder.build_cartesian_2d(x, y)?;
    // Removes trailing digits of steps such as 0.1.
    let number = |x: &f64| ((x * 1e6).round() / 1e6).to_string();
    let mut mesh = chart.configure_mesh();
    mesh.x_desc(x_label).y_desc(y_label).x_label_formatter(&number).y_label_formatter(&number);
    mesh.light_line_style(WHITE).draw()?;
    for (at, (name, points)) in curves.iter().enumerate() {
        // The more points, the thinner: a training loss is noisy, a validation loss is not.
        let width = if points.len() > 100 { 1 } else { 2 };
        let style = COLOURS[at % COLOURS.len()].stroke_width(width);
        let line = move |(x, y)| PathElement::new(vec![(x, y), (x + 16, y)], style);
        chart.draw_series(LineSeries::new(points.iter().copied(), style))?.label(*name).legend(line);
    }
    if curves.len() > 1 {
        chart.configure_series_labels().background_style(WHITE).border_style(RGBColor(200, 200, 200)).draw()?;
    }
    area.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_curve_is_drawn_and_named() {
        let pair =
            [Curve::new("training", [(0.0, 3.0), (1.0, f64::NAN), (2.0, 1.0)]), Curve::new("held <out>", [(2.0, 2.0)])];
        let svg = curves("Loss", ["step", "nats"], &pair).expect("drawn").to_string();
        for text in ["Loss", "step", "nats", "training", "held &lt;out&gt;"] {
            assert!(svg.contains(text), "{text} in {svg}");
        }
        assert!(!svg.contains("NaN"), "{svg}");
    }

    #[test]
    fn one_point_is_enough_and_none_are_refused() {
        assert!(curves("", ["x", "y"], &[Curve::new("one", [(5.0, 5.0)])]).is_ok());
        let none = curves("", ["x", "y"], &[Curve::new("none", [(f64::NAN, 1.0)])]);
        assert_eq!(none.expect_err("no points").to_string(), "a picture could not be drawn: there are no points");
    }
}
