//! How fragmented a cluster is at which occupancy, by policy: the picture in `docs/`.

use crate::claims::{SLICES, USUAL};
use crate::packing::{Load, churn};
use crate::placers::{Fgd, Placer, Rule, Shipped, Simple, fragmentation};
use aliquot_allocator::schedule::Strategy;
use plotters::prelude::*;
use std::path::Path;

const NODES: usize = 10;
const LEVELS: std::ops::RangeInclusive<u32> = 6..=19;

/// Occupancy and fragmentation, both in percent of all slices.
type Curve = Vec<(f64, f64)>;

fn curve(new: &dyn Fn() -> Box<dyn Placer>, seed: u64) -> Curve {
    let mut curve = Curve::new();
    for level in LEVELS {
        let mut placer = new();
        let (mut used, mut useless, mut looks) = (0.0, 0.0, 0.0);
        let total = f64::from(u32::try_from(NODES).expect("few") * 8 * SLICES);
        churn(
            NODES,
            Load::Level(f64::from(level) / 20.0),
            1_600,
            &USUAL,
            seed,
            placer.as_mut(),
            &mut |at, placer| {
                if at >= 800 && at % 16 == 0 {
                    let gpus = placer.gpus();
                    used += f64::from(gpus.iter().map(|gpu| gpu.count_ones()).sum::<u32>()) / total;
                    useless += gpus.iter().map(|gpu| fragmentation(*gpu, &USUAL)).sum::<f64>() / total;
                    looks += 1.0;
                }
            },
        );
        let point = (100.0 * used / looks, 100.0 * useless / looks);
        // Beyond what a policy can fill, it only stays where it is.
        if curve.last().is_none_or(|(before, _)| point.0 > before + 0.5) {
            curve.push(point);
        }
    }
    curve
}

/// Draws the picture.
pub(crate) fn draw(path: &Path, seed: u64) -> Vec<(&'static str, Curve)> {
    let of = |rule| move || -> Box<dyn Placer> { Box::new(Simple::new(NODES, rule, 1)) };
    let curves: Vec<(&'static str, Curve)> = vec![
        ("first fit, emptiest node", curve(&of(Rule::Spread), seed)),
        ("first fit, random node", curve(&of(Rule::Random), seed)),
        ("first fit, fullest node", curve(&of(Rule::Fullest), seed)),
        ("FGD, told the mix", curve(&|| Box::new(Fgd::new(NODES, USUAL)), seed)),
        ("aliquot", curve(&|| Box::new(Shipped::new(NODES, Strategy::BinPack)), seed)),
    ];
    let colours = [
        RGBColor(150, 150, 150),
        RGBColor(190, 140, 60),
        RGBColor(70, 130, 180),
        RGBColor(120, 90, 170),
        RGBColor(0, 140, 70),
    ];
    let root = SVGBackend::new(path, (760, 460)).into_drawing_area();
    root.fill(&WHITE).expect("drawn");
    let most = curves.iter().flat_map(|(_, curve)| curve).map(|(_, useless)| *useless).fold(1.0, f64::max);
    let mut chart = ChartBuilder::on(&root)
        .margin(14)
        .caption("Free slices that the mix cannot use, 80 H100", ("sans-serif", 18))
        .x_label_area_size(42)
        .y_label_area_size(52)
        .build_cartesian_2d(30.0..100.0, 0.0..most * 1.05)
        .expect("drawn");
    chart
        .configure_mesh()
        .x_desc("slices in use, percent")
        .y_desc("fragmentation, percent of all slices")
        .light_line_style(WHITE)
        .label_style(("sans-serif", 13))
        .draw()
        .expect("drawn");
    for ((name, curve), colour) in curves.iter().zip(colours) {
        let style = colour.stroke_width(2);
        chart
            .draw_series(LineSeries::new(curve.iter().copied(), style))
            .expect("drawn")
            .label(*name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], style));
        chart.draw_series(curve.iter().map(|point| Circle::new(*point, 3, colour.filled()))).expect("drawn");
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE)
        .border_style(RGBColor(200, 200, 200))
        .label_font(("sans-serif", 13))
        .draw()
        .expect("drawn");
    root.present().expect("written");
    curves
}
