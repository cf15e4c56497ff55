//! Figures in the form in which the benchmarks write them.

use crate::figures::Figure;
use crate::world::Devices;

/// Returns the figures as JSON for `limiter.json`.
pub fn json(figures: &[Figure], devices: &Devices) -> String {
    let one = |figure: &Figure| {
        let Figure { name, value, unit, baseline, note } = figure;
        serde_json::json!({
            "name": name,
            "value": value,
            "unit": unit,
            "baseline": baseline,
            "ratio": if *baseline == 0.0 { 0.0 } else { value / baseline },
            "command": format!("limiter-sim; {note}"),
            "assumed": devices.assumed,
        })
    };
    figures.iter().map(one).collect::<serde_json::Value>().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::world::VARIANTS;

    #[test]
    fn what_is_recorded_is_no_longer_marked_as_assumed() {
        let figure = Figure { name: "f".to_owned(), value: 1.0, unit: "u", baseline: 1.0, note: "n" };
        let [assumed, told] = [None, Some(1_500_000)].map(Devices::new);
        assert!(
            json(std::slice::from_ref(&figure), &assumed)
                .contains("\"assumed\":[\"time slices\",\"switches\",")
        );
        assert!(json(&[figure], &told).contains("\"assumed\":[\"switches\","));
        let slices = |devices: &Devices| devices.variants.map(|variant| variant.slices.slice_ns);
        assert_eq!(slices(&assumed), VARIANTS.map(|variant| variant.slices.slice_ns));
        assert_eq!(slices(&told), [1_500_000; 3]);
    }
}
