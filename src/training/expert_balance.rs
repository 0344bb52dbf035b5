//! How evenly a step's tokens were distributed over the experts of a model.

/// The figures of a step's routers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertBalance {
    /// The mean load-balancing loss of the layers, before its factor: 1 if all experts get as many
    /// tokens, and up to their number.
    pub balance_loss: f64,
    /// The mean z-loss of the routers, before its factor.
    pub z_loss: f64,
    /// The load of the expert with the fewest tokens of its layer, over all layers, where 1 is an even
    /// share.
    pub least_load: f64,
    /// That of the expert with the most tokens.
    pub most_load: f64,
}

/// How many layers of a model have experts, and how many experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ExpertLayers {
    pub(crate) layers: usize,
    pub(crate) experts: usize,
}

impl ExpertLayers {
    /// How many figures they are on the device.
    pub(crate) fn count(self) -> usize {
        2 + self.layers * self.experts
    }

    /// Of their figures on the device: the two losses, then each expert's tokens, layer by layer.
    pub(crate) fn balance(self, figures: &[f64]) -> Option<ExpertBalance> {
        let (&[balance_loss, z_loss], loads) = figures.split_first_chunk::<2>()?;
        let loads = loads.chunks_exact(self.experts).flat_map(|layer| {
            let even = layer.iter().sum::<f64>() / self.experts as f64;
            layer.iter().map(move |load| load / even)
        });
        let [least_load, most_load] =
            loads.fold([f64::INFINITY, 0.0], |[least, most], load| [least.min(load), most.max(load)]);
        Some(ExpertBalance { balance_loss, z_loss, least_load, most_load })
    }
}

impl ExpertBalance {
    /// With their names in metrics.
    pub(crate) fn named(self) -> [(&'static str, f64); 4] {
        let Self { balance_loss, z_loss, least_load, most_load } = self;
        [
            ("experts/balance_loss", balance_loss),
            ("experts/z_loss", z_loss),
            ("experts/least_load", least_load),
            ("experts/most_load", most_load),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_are_relative_to_an_even_share_of_their_layer() {
        let layers = ExpertLayers { layers: 2, experts: 3 };
        assert_eq!(layers.count(), 8);
        let balance = layers.balance(&[1.5, 0.25, 10.0, 10.0, 10.0, 50.0, 0.0, 100.0]).expect("figures of two layers");
        let wanted = ExpertBalance { balance_loss: 1.5, z_loss: 0.25, least_load: 0.0, most_load: 2.0 };
        assert_eq!(balance, wanted);
        assert_eq!(layers.balance(&[1.0]), None);
    }
}
