//! Feed-forward layers in CubeCL: the gradient's product is fused with the activation's slopes, if
//! a GEMM supports it.

use burn_cubecl::element::BoolElement;
use burn_cubecl::{CubeBackend, CubeRuntime, FloatElement, IntElement};

use super::{FeedForwardBackward, FeedForwardGradients, FeedForwardLayer, FeedForwardOps};
use crate::checked::Checked;
use crate::ops::dropout::dropout_rows;
use crate::ops::linear::cubecl::gemm::{product, product_by_slopes};
use crate::ops::linear::cubecl::{activation_gradient, parameter_gradients};
use crate::ops::linear::{Saved, Wanted, float_weight};
use crate::tensor::{float, primitive};

impl<R, F, I, BT> FeedForwardOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn feed_forward_backward(operands: Checked<FeedForwardBackward<Self>>) -> FeedForwardGradients<Self> {
        let FeedForwardBackward { grad, x, saved, hidden, layer, wanted, dropout, sums } = operands.into_inner();
        let FeedForwardLayer { up, up_bias, activation, down, down_bias } = layer;
        let [up, down] = [up, down].map(|weight| primitive(float_weight(weight, &grad)));
        let [up_sum, down_sum] = sums.map(|sum| sum.map(primitive));
        let dtype = grad.dtype();

        let grad = primitive(dropout_rows(grad, dropout));
        let [up_wanted, down_wanted] = wanted;
        let down_wanted = Wanted { bias: down_wanted.bias && down_bias.is_some(), ..down_wanted };
        let up_wanted = Wanted { bias: up_wanted.bias && up_bias.is_some(), ..up_wanted };
        let (d_down, down_bias) = parameter_gradients(grad.clone(), hidden.map(primitive), down_sum, down_wanted);

        let fused = match &saved {
            Saved::Slopes(slopes) => product_by_slopes(&grad, &down, &primitive(slopes.clone())),
            Saved::Product(_) => None,
        };
        // Saved tensors are not needed after this.
        let grad = match fused {
            Some(fused) => {
                drop((saved, grad));
                fused
            }
            None => activation_gradient(product(grad, down, dtype, dtype), saved, up_bias, activation),
        };
        let (d_up, up_bias) = parameter_gradients(grad.clone(), x.map(primitive), up_sum, up_wanted);
        FeedForwardGradients {
            x: float(product(grad, up, dtype, dtype)),
            up: d_up.map(float),
            up_bias: up_bias.map(float),
            down: d_down.map(float),
            down_bias: down_bias.map(float),
        }
    }
}
