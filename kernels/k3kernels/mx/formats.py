"""The formats of OCP Microscaling v1.0 that K3 uses: elements, block size, and how a block's scale is chosen."""

from dataclasses import dataclass

BLOCK = 32  # neighbours along the last dimension that share a scale (table 1)
BIAS = 127  # scale byte b stands for 2^(b - 127) (E8M0, section 5.4.1)
NAN_SCALE = 255
ZERO_BLOCK_SCALE = BIAS  # written for blocks of zeros, whose scale nothing decides: 2^0
MANTISSA = 23  # bits of fp32's

RULES = ("round_up", "floor", "nearest")


@dataclass(frozen=True)
class Element:
    """A floating-point element: sign, exponent and mantissa of `bits` in all.

    `min_exponent` is that of the smallest normal number, `max_exponent` that of `largest`; both unbiased.
    """

    name: str
    bits: int
    mantissa_bits: int
    min_exponent: int
    max_exponent: int
    largest: float

    def scale_carry(self, rule: str) -> int:
        """What is added to the bits of a block's largest fp32 magnitude before its exponent is read off.

        The scale is 2^(exponent - max_exponent), so a carry out of the mantissa doubles it:

        * round_up: where the magnitude would exceed `largest`, 2^ceil(log2(amax / largest)). Nothing is ever clipped;
          what is nearer to 2^128 than to the code below it (from 2.98e38 on in E2M1, 3.30e38 in E4M3) becomes infinite.
        * floor: never, 2^(floor(log2 amax) - max_exponent), section 6.3. Clips what lies beyond `largest`.
        * nearest: where the magnitude, rounded to the element's mantissa with ties away from zero, is the next power
          of two. Clips by less than half a step in E2M1, and by less than one and a half in E4M3, whose last code
          before the next power of two is NaN; called "even" elsewhere, and compressed-tensors' rule for MXFP4.

        Raises:
            ValueError: unknown rule.
        """
        if rule == "floor":
            return 0
        if rule == "round_up":
            fraction = self.largest / 2.0**self.max_exponent - 1.0
            return (1 << MANTISSA) - 1 - int(fraction * (1 << MANTISSA))
        if rule == "nearest":
            return 1 << (MANTISSA - 1 - self.mantissa_bits)
        raise ValueError(f"The scale rule is {rule!r}; it must be one of {', '.join(RULES)}.")


E2M1 = Element("e2m1", bits=4, mantissa_bits=1, min_exponent=0, max_exponent=2, largest=6.0)  # section 5.3.3
E4M3 = Element("e4m3", bits=8, mantissa_bits=3, min_exponent=-6, max_exponent=8, largest=448.0)  # section 5.3.1
ELEMENTS = {element.name: element for element in (E2M1, E4M3)}
E4M3_NAN = 0x7F  # with either sign; E2M1 has none
